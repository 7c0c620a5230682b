"""Rewards by networks with published weights."""
