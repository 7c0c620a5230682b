"""What surrounds the updates: model set-up, checkpoints, evaluation, callbacks."""
