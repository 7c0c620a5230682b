"""A training that can be killed: `python resumable_run.py FOLDER SETTINGS_JSON [KILL_AT]`, run by test_resume.py.

Resumes where FOLDER has a whole checkpoint. KILL_AT is `rollout`, `update` or `checkpoint`: the process kills itself
with SIGKILL in the middle of one, after as many calls of it as the setting `kill_after` says.
"""

import json
import os
import signal
import sys

import torch
from tiny_runs import trainer_for

from diffusion_grpo import generation, hub, trainer


def kill_in(module, name, calls_before):
    """The process dies inside the call number `calls_before` + 1 of `module.name`, after it has begun its work."""
    real, calls = getattr(module, name), []

    def deadly(*args, **kwargs):
        calls.append(None)
        result = real(*args, **kwargs)
        if len(calls) > calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, deadly)


def main(folder: str, settings: str, kill_at: str | None = None) -> None:
    torch.set_num_threads(1)
    settings = json.loads(settings)
    calls_before = settings.pop("kill_after", 0)
    run = trainer_for(folder, **settings)
    if kill_at == "rollout":
        kill_in(generation, "rollout", calls_before)
    elif kill_at == "update":
        kill_in(trainer, "replay", calls_before)
    elif kill_at == "checkpoint":
        kill_in(hub, "save_policy", calls_before)
    run.train(resume_from_checkpoint=True)
    run.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
