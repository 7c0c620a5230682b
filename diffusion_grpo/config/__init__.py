"""Settings: `DiffusionGRPOConfig`, its themes, its validation, and the command line's arguments."""
