"""Subjects that are a serving engine: its own loader and MoE layer, with taps on the Buffer inside."""
