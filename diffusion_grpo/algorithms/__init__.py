"""Advantages and losses: mathematics on tensors, without pipelines, settings or processes."""
