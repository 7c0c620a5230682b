"""How the ways of training with several processes divide the training state, as far as a plan needs to know."""

import json
import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..config.files import read_text


@dataclass
class Sharding:
    """How the training state is divided among the processes."""

    name: str
    processes: int
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    live_weights: int = 10**9  # that ZeRO-3 keeps gathered, DeepSpeed's default of stage3_max_live_parameters
    bucket: int = 0  # values that DeepSpeed gathers before it reduces them, if its configuration says how many

    @classmethod
    def of(cls, launch: dict[str, Any]) -> "Sharding":
        """Read the sharding from the settings of `accelerate launch`."""
        kind, processes = launch["distributed_type"], launch["num_processes"]
        if kind == "DEEPSPEED":
            config = launch.get("deepspeed_config") or {}
            if "deepspeed_config_file" in config:
                config = _read_deepspeed_config(config["deepspeed_config_file"])
            stage = int(config.get("zero_stage", 2))
            devices = [config.get(f"offload_{what}_device") for what in ("optimizer", "param")]
            optimizer, parameters = (device not in ("none", None) for device in devices)
            divided = (stage >= 1, stage >= 2, stage == 3)
            sizes = {name: config[name] for name in ("live_weights", "bucket") if name in config}
            return cls(f"zero{stage}", processes, *divided, optimizer, parameters and stage == 3, **sizes)
        if kind == "FSDP":
            is_offloaded = bool((launch.get("fsdp_config") or {}).get("fsdp_offload_params"))
            return cls("fsdp2", processes, True, True, True, is_offloaded, is_offloaded)
        if kind == "NO" or str(kind).startswith("MULTI_"):
            return cls("ddp" if processes > 1 else "one process", processes)
        raise ValueError(
            f"distributed_type {kind} cannot be planned; use a multi-GPU, DeepSpeed or FSDP configuration."
        )

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed casts the weights, and steps float32 copies of the trained ones."""
        return self.name.startswith("zero")

    def share(self, count: int, is_divided: bool) -> int:
        """Return how many of `count` bytes are on one process."""
        return math.ceil(count / self.processes) if is_divided else count


def override_launch_settings(launch: dict[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Return the settings of `accelerate launch`, overridden by `deepspeed` and `fsdp` of the training arguments."""
    if args.deepspeed:
        config = {"deepspeed_config_file": args.deepspeed}
        return launch | {"distributed_type": "DEEPSPEED", "deepspeed_config": config}
    if args.fsdp:
        is_offloaded = (args.fsdp_config or {}).get("cpu_offload", False)
        return launch | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": is_offloaded}}
    return launch


def _read_deepspeed_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed's own configuration says about sharding, under accelerate's names."""
    if isinstance(config, str):
        try:
            config = json.loads(read_text(config))
        except (OSError, ValueError) as error:
            raise ValueError(f"DeepSpeed's configuration {config} cannot be read: {error}") from error
    zero = config.get("zero_optimization", {})
    devices = {what: (zero.get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param")}
    sizes = {"live_weights": zero.get("stage3_max_live_parameters"), "bucket": zero.get("reduce_bucket_size")}
    sizes = {name: int(size) for name, size in sizes.items() if isinstance(size, (int, float))}  # not "auto"
    if "bucket" in sizes and zero.get("overlap_comm") and zero.get("stage", 0) < 3:
        sizes["bucket"] *= 2  # one is filled while the other is sent
    offloads = {f"offload_{what}_device": device for what, device in devices.items()}
    return {"zero_stage": zero.get("stage", 0), **offloads, **sizes}
