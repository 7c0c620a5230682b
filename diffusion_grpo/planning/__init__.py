"""Plans of the batches, network evaluations and memory of a run, made before anything is loaded."""
