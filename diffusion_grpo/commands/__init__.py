"""The commands of `diffusion-grpo`, a file each: `add_options(parser)` says what one takes and sets its `run`."""
