"""Short runs one after the other, as each of several processes makes them, started by `ranks_server.py`.

Among their settings, `stage` is ZeRO's, `zero` goes into that part of DeepSpeed's configuration and `more` beside it;
`resume` is the checkpoint to go on from, in the same folder. Numbers of micro-batches are given for one process.
Starting Python and DeepSpeed takes longer than the runs, so many runs share a start.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_runs import SMOOTH, SMOOTH_VIDEOS, trainer_for


def deepspeed_config(stage: int, **zero) -> dict:
    """Return a usual configuration, with a threshold low enough to shard the tiny networks' larger weights."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100, "reduce_bucket_size": "auto", **zero}
    names = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, **dict.fromkeys(names.split(), "auto")}


def use_deepspeed_on_a_cpu() -> None:
    """Let DeepSpeed use the CPU, and gloo alone: its kernel for shared memory takes over a minute to compile."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed import ops

    ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def partitioning(trainer) -> dict:
    """Return which weights this process holds."""
    sharded = [p for p in trainer.model.parameters() if hasattr(p, "ds_tensor") and not p.ds_persist]
    return {
        "stage": int(trainer.backend.sharding.removeprefix("zero").replace("ddp", "0")),
        "empty": sum(p.numel() == 0 for p in sharded),
        "held": sum(p.ds_tensor.numel() for p in sharded),
        "all": sum(p.ds_numel for p in sharded),
        "kept": sum(getattr(p, "ds_persist", False) for p in trainer.model.parameters()),
        "dtype": str(next(trainer.model.parameters()).dtype),
        "frozen_whole": all(p.numel() and not hasattr(p, "ds_id") for p in trainer.pipe.text_encoder.parameters()),
    }


def run(folder: Path, name: str, settings: dict) -> None:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    for setting in ("gradient_accumulation_steps", "steps_per_generation"):
        if setting in settings:
            settings[setting] //= processes
    if stage := settings.pop("stage", 0):
        settings["deepspeed"] = deepspeed_config(stage, **settings.pop("zero", {})) | settings.pop("more", {})
    settings.pop("zero", None)
    resume = settings.pop("resume", None)
    settings = (SMOOTH_VIDEOS if settings.get("name", "").startswith("wan") else SMOOTH) | settings
    trainer = trainer_for(folder / name, **settings)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    trainer.save_model()
    report = {"wrapper": type(trainer.model_wrapped).__name__, **partitioning(trainer)}
    for key in ("ratio/max_error", "reward", "eval_reward", "grad_norm", "kl"):
        report[key] = [entry[key] for entry in trainer.state.log_history if key in entry]
    report["auto"] = None if not stage else trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    if stage:  # which forgets what was logged
        with pytest.raises(ValueError, match="DeepSpeed cannot train again with the same trainer"):
            trainer.train(resume_from_checkpoint=True)
    rank = trainer.accelerator.process_index
    (folder / name / f"result-{rank}.json").write_text(json.dumps(report, default=str))
    trainer.accelerator.wait_for_everyone()


def run_all(folder: Path, runs: dict[str, dict]) -> None:
    """Make each run in a folder of its name."""
    use_deepspeed_on_a_cpu()
    for name, settings in runs.items():
        run(folder, name, settings)
    torch.distributed.destroy_process_group()
