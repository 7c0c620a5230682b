"""A pipeline seen as a policy: rollout, replay, and what they share."""
