"""One rollout: samples, rewards, advantages, and the buffer that its updates read."""
