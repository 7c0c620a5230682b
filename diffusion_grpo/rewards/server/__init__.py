"""Rewards that another process or machine computes."""
