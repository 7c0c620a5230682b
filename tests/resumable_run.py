"""A run that can be killed, as a process of `ranks_server.py` runs it for test_resume.py."""

from rank_runs import kill_in
from tiny_runs import trainer_for

from diffusion_grpo.algorithms import grpo
from diffusion_grpo.rollout import generate
from diffusion_grpo.weights import files as hub


def run(folder, settings, kill_at=None, calls_before=0):
    """Train, from the whole checkpoint in `folder` if there is one.

    If `kill_at` is `rollout`, `update` or `checkpoint`, the process kills itself with SIGKILL in the middle of one,
    after `calls_before` calls of it.
    """
    own = trainer_for(folder, **settings)
    places = {
        "rollout": (generate, "RolloutRequest"),
        "update": (grpo.GRPO, "loss"),
        "checkpoint": (hub, "save_policy"),
    }
    if kill_at is not None:
        kill_in(*places[kill_at], calls_before)
    own.train(resume_from_checkpoint=True)
    own.save_model()
