"""Datasets, samplers, media columns, and the inputs of a pipeline call."""
