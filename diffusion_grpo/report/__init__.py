"""What a run shows of itself: the report's page, its plots, and the model card."""
