"""Short runs one after the other, as each of several processes makes them, started by `ranks_server.py`.

The global batch does not depend on the number of processes: settings are given for one process. Each folder gets
`result.json`, what the run logged and how it was sharded, and its whole trained weights.
"""

import json
import os
from pathlib import Path

import torch
from rank_runs import REWARDS, built, write_weights
from tiny_runs import logged
from torch.distributed.tensor import DTensor, Shard


def shares(trainer) -> dict:
    """Return how much of the network this process holds, and how; frozen parameters count too."""
    parameters = [parameter for network in trainer.policy.networks for parameter in network.parameters()]
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return {
        "parameters": len(parameters),
        "sharded": sum(isinstance(p, DTensor) and all(isinstance(x, Shard) for x in p.placements) for p in parameters),
        "share": local / sum(p.numel() for p in parameters),
        "units": sorted({type(m).__name__ for m in trainer.model.modules() if type(m).__name__.startswith("FSDP")}),
    }


def run(folder: Path, settings: dict) -> None:
    """Train once and report what tests ask about."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        settings.pop("context_parallel_size", None)
    resume = settings.pop("resume", None)
    is_offloaded = settings.pop("offload", False)
    if world > 1:
        os.environ["FSDP_OFFLOAD_PARAMS"] = str(is_offloaded)
    rewards = REWARDS["smooth video" if settings.get("name", "").startswith("wan") else "smooth"]
    trainer = built(folder, {"reward_weights": [0.0, 1.0], **settings}, rewards)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    logs = [entry for entry in trainer.state.log_history if "ratio/max_error" in entry]
    report = shares(trainer) | {
        "wrapper": type(trainer.model_wrapped).__name__,
        "ratio": max((entry["ratio/max_error"] for entry in logs), default=0.0),
        "rewards": [entry["reward"] for entry in logs],
        "eval_rewards": logged(trainer, "eval_reward"),
        "kl": [entry["kl"] for entry in logs if "kl" in entry],
    }
    write_weights(trainer, folder)
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps(report))


def run_all(folder: Path, cases: dict[str, dict]) -> None:
    """Make each run in a folder of its name, with FSDP2 as a launcher asks for it."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    for name, settings in cases.items():
        run(folder / name, settings)
    torch.distributed.destroy_process_group()
