"""Rewards computed by another process or machine."""
