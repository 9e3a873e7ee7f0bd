"""Subjects that are a Buffer: our own layer around it, any module from outside, captured replays."""
