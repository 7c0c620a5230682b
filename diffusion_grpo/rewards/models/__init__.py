"""Rewards computed by networks with published weights."""
