"""`DiffusionGRPOConfig`: its fields, grouped by theme, its validation, and how the command line reads it."""
