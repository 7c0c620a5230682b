"""Rewards computed from pixels alone."""
