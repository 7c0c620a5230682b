"""One short run, as each of several processes makes it, started by `ranks_server.py`.

The global batch is the same whatever the number of processes: `gradient_accumulation_steps` is given for one process.
"""

import json
import os

import torch
from safetensors.torch import save_file
from tiny_runs import brightness, first_frame_brightness, trained_weights, trainer_for


def run(folder, settings):
    """Write what the run logged to `result.json`, and its trained weights beside it."""
    processes = int(os.environ.get("WORLD_SIZE", 1)) // settings.get("context_parallel_size", 1)
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if name in settings:
            settings[name] //= processes
    rewards = first_frame_brightness if settings.get("name", "").startswith("wan") else brightness
    trainer = trainer_for(folder, rewards=rewards, **settings)
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "ratio/max_error" in entry]
        report = {
            "wrapper": type(trainer.model_wrapped).__name__,
            "ratio": max(entry["ratio/max_error"] for entry in logs),
            "rewards": [entry["reward"] for entry in logs],
            "grad_norm": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        }
        (folder / "result.json").write_text(json.dumps(report))
        save_file(trained_weights(trainer), folder / "weights.safetensors")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
