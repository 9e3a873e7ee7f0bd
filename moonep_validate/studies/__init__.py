"""Loops over the pipeline: shrink, search, mutate, false alarms, races, benchmarks."""
