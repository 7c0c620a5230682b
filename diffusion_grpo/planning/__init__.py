"""`diffusion-grpo plan`: what a run will ask for, before anything is loaded."""
