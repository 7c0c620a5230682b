"""`diffusion-grpo sample`: samples and their scores, without training."""
