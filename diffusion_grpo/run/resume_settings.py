"""Compare settings of a run with those of the checkpoint that it resumes from.

Some settings identify the run. Within a rollout, everything that the replay of its samples depends on must stay the
same too.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig

from ..algorithms.batch import Rows
from ..config.settings import DiffusionGRPOConfig, describe
from ..data.inputs import PipelineInputs
from ..policy.sde import SDES, sdes_of
from ..weights.public_names import strip_folders, strip_secrets
from .manifest import ResumeError

# settings that identify a run and may not change when it is resumed; others may
IDENTITY_SETTINGS = (
    "seed",
    "num_generations",
    "num_inference_steps",
    "sigmas",
    "sde_type",
    "noise_level",
    "log_prob_type",
    "trained_steps",
    "num_trained_steps",
    "step_selection",
    "noisy_steps",
    "samples_per_latent",
    "scheduler_kwargs",
    "num_iterations",
    "best_of_n",
    "advantage_estimator",
    "load_in_4bit",
    "load_in_8bit",
    "quantization",
)
# properties that give the value in effect when a setting is left open
RESOLVED = {
    "num_trained_steps": "trained_count",
    "samples_per_latent": "latent_sharing",
}
LORA_SETTINGS = (
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
)
# Further settings that a replay depends on. Batch sizes are left out: they change results only by rounding.
ROLLOUT_SETTINGS = (
    "loss_type",
    "step_interval",
    "temperature",
    "top_k",
    "top_p",
    "shuffle_dataset",
    "bf16",
    "fp16",
)


def resolve_settings(args: DiffusionGRPOConfig) -> dict[str, Any]:
    """Return the settings that a run has to keep; a default and the same value written out are equal.

    `is_renoised` tells for which kind of algorithm the defaults are.
    """
    found = {name: getattr(args, RESOLVED.get(name, name)) for name in IDENTITY_SETTINGS}
    found |= {"trained_steps": [args.trainable_steps.start, args.trainable_steps.stop]}
    found["is_renoised"] = args.is_renoised
    process = SDES.get(args.sde_type)
    if process is None:  # "auto": the scheduler decides once the model is loaded
        return _publish(found)
    if sdes_of(process.coordinates)[0] is process:  # "auto" means this process for every scheduler that it fits
        return _publish(found | {"sde_type": "auto"})
    level = process.noise_level if args.noise_level is None else args.noise_level
    return _publish(found | {"noise_level": level})


def describe_lora(peft_config: PeftConfig | None) -> dict[str, Any]:
    """Return the settings, other than the rank, that define the trained layers; nothing without a new LoRA."""
    if peft_config is None:
        return {}
    found = {name: getattr(peft_config, name, None) for name in LORA_SETTINGS}
    return {name: sorted(value) if isinstance(value, (set, list, tuple)) else value for name, value in found.items()}


def describe_rollout(inputs: PipelineInputs) -> dict[str, Any]:
    """Return everything that the replay of a rollout depends on: settings and arguments of pipeline calls."""
    args = inputs.args
    found = {name: getattr(args, name) for name in ROLLOUT_SETTINGS} | resolve_settings(args)
    found["data_seed"] = args.seed if args.data_seed is None else args.data_seed
    found["updates per rollout"] = args.batch_sizes.updates_per_rollout
    is_apart = args.multi_objective_aggregation == "loss_per_reward"  # else a sample has one advantage
    found["multi_objective_aggregation"] = "loss_per_reward" if is_apart else "one advantage per sample"
    calls = {name: None if it.default is it.empty else it.default for name, it in inputs.parameters.items()}
    for name, value in (calls | inputs.fixed).items():
        found[f"pipeline_kwargs: {name}" if name in found else name] = _sum_up(value)
    return _publish(found)


def hash_rows(rows: Rows, inputs: PipelineInputs) -> list[str]:
    """Return a hash of each row's inputs to the pipeline; of images and videos, only the sizes count.

    Their pixels may differ by rounding if another version of a library decodes them.
    """
    hashes: dict[int, str] = {}  # samples of a prompt share one row
    for row in rows:
        if id(row) not in hashes:
            given = {name: row[name] for name in sorted({"prompt", *inputs.accepted} & row.keys())}
            hashes[id(row)] = _hash(json.dumps(_sum_up(given)).encode())
    return [hashes[id(row)] for row in rows]


def find_difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Describe the first setting that has another value here; None if all settings that both have are equal."""
    for name in there:
        if name in here and there[name] != here[name]:
            found = ("the default" if value is None else repr(value) for value in (there[name], here[name]))
            return "{} is {} there and {} here".format(name, *found)
    return None


def check_rollout(checkpoint: Path, made_under: dict[str, Any], inputs: PipelineInputs) -> None:
    """Refuse to resume within a rollout under other settings."""
    difference = find_difference(made_under, describe_rollout(inputs))
    if difference is not None:
        raise ResumeError(
            f"{checkpoint} was saved in the middle of a rollout that was made with other settings ({difference}); "
            "resume with the earlier settings, or from a checkpoint between two rollouts."
        )


def check_rows(checkpoint: Path, hashes: list[str], rows: Rows, inputs: PipelineInputs) -> None:
    """Refuse to resume within a rollout of other prompts."""
    pairs = zip(rows, hashes, hash_rows(rows, inputs), strict=True)
    changed = next((row for row, there, here in pairs if there != here), None)
    if changed is not None:
        raise ResumeError(
            f"{checkpoint} was saved in the middle of a rollout of other dataset rows (the one with the prompt "
            f"{changed.get('prompt')!r} is not among them, or has other inputs now); resume with the earlier dataset, "
            "or from a checkpoint between two rollouts."
        )


def _publish(settings: dict[str, Any]) -> dict[str, Any]:
    """Make settings serialisable as JSON, without folders and secrets."""
    return strip_folders(strip_secrets(describe(settings)))


def _sum_up(value: Any) -> Any:
    """Make a value serialisable as JSON like `describe`, with a hash of the contents of a tensor or array."""
    if isinstance(value, dict):
        return {str(name): _sum_up(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sum_up(item) for item in value]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().flatten().view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        content = value
    else:
        return describe(value)
    return f"{describe(value)} {_hash(content.tobytes())}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
