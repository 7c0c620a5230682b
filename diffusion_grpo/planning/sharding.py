"""How the ways of training with several processes divide the training state, as far as a plan needs to know."""

import json
import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..config.files import read_text

LIVE_WEIGHTS = 10**9


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
    live_weights: int = LIVE_WEIGHTS
    bucket: int = 0

    @classmethod
    def of(cls, launch: dict[str, Any]) -> "Sharding":
        """Read the sharding from the settings of `accelerate launch`."""
        kind, processes = launch["distributed_type"], launch["num_processes"]
        if kind == "DEEPSPEED":
            given = launch.get("deepspeed_config") or {}
            if "deepspeed_config_file" in given:
                given = _read_deepspeed_config(given["deepspeed_config_file"])
            stage = int(given.get("zero_stage", 2))
            devices = [given.get(f"offload_{what}_device") for what in ("optimizer", "param")]
            optimizer, parameters = (device not in ("none", None) for device in devices)
            shared = (stage >= 1, stage >= 2, stage == 3)
            sizes = {name: given[name] for name in ("live_weights", "bucket") if isinstance(given.get(name), int)}
            return cls(f"zero{stage}", processes, *shared, optimizer, parameters and stage == 3, **sizes)
        if kind == "FSDP":
            away = bool((launch.get("fsdp_config") or {}).get("fsdp_offload_params"))
            return cls("fsdp2", processes, True, True, True, away, away)
        if kind in ("NO", "MULTI_CPU") or str(kind).startswith("MULTI_"):
            return cls("ddp" if processes > 1 else "one process", processes)
        raise ValueError(
            f"distributed_type {kind} cannot be planned; use a multi-GPU, DeepSpeed or FSDP configuration."
        )

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer moves float32 copies of the trained weights, whatever their dtype."""
        return self.name.startswith("zero")

    @property
    def loads_late(self) -> bool:
        """Whether the trained network stays in its safetensors file until its weights are sharded.

        If so, all processes of a machine share its pages, and the system may drop them. Otherwise, each process first
        holds the whole network in its own memory.
        """
        return self.parameters

    @property
    def copies_gradients(self) -> bool:
        """Whether gradients are copied to be summed over the processes."""
        return self.name == "ddp"

    @property
    def basis(self) -> str:
        """Where the numbers for divided state come from."""
        if self.keeps_masters:
            return "as DeepSpeed documents it"
        return "FSDP2 divides each tensor" if self.name == "fsdp2" else "the code's own tensors"

    def share(self, count: int, is_divided: bool) -> int:
        """Return how many of `count` bytes are on one process."""
        return math.ceil(count / self.processes) if is_divided else count


def override_launch_settings(launch: dict[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Return the settings of `accelerate launch`, overridden by `deepspeed` and `fsdp` of the training arguments."""
    if args.deepspeed:
        return launch | {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": args.deepspeed},
        }
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
    return sizes | {
        "zero_stage": zero.get("stage", 0),
        **{f"offload_{what}_device": value for what, value in devices.items()},
    }
