"""Rewards that read the text in an image."""
