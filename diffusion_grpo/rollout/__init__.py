"""One generation: samples, rewards, advantages, and the buffer that the updates read."""
