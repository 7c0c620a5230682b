"""The files that a run leaves in its folder."""
