"""`DiffusionGRPOConfig`: its fields by theme, its validation, and how the command line reads it."""
