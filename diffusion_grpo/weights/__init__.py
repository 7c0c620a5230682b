"""Weights on disk and in a pipeline: LoRAs, whole networks, quantised bases."""
