"""The rest of a rollout, read back from a checkpoint that lies within it.

In: the files that `RolloutBuffer.save` wrote, one a process. Out: the buffer of one of the processes there are now,
which may be fewer or more. A module of its own because only here are the samples of several processes put together.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import Trajectory
from ..training.resume_point import refuse_unreadable
from .buffer import Recorded, RolloutBuffer
from .order import RolloutOrder
from .value_model import ValueTargets

KINDS = {kind.__name__: kind for kind in (Trajectory, TokenTrajectory)}


def rollout_file(folder: Path, process: int) -> Path:
    """Where a process keeps its part of the rollout that a checkpoint lies within."""
    return folder / f"rollout-rank{process}.safetensors"


def restored_buffer(
    folder: Path, order: RolloutOrder, process: int, rows_at: Callable[[list[int]], list[dict[str, Any]]], device: Any
) -> RolloutBuffer:
    """The buffer of `process`, bit for bit; what other processes rolled out is read from their files.

    Args:
        folder: of the checkpoint.
        order: of the generation, for the processes there are now.
        process: number of this one.
        rows_at: dataset rows by the samples' positions in the generation.
        device: where trajectories are kept.

    Raises:
        ValueError: a file is missing.
    """
    args = order.args
    own = rollout_file(folder, process)
    parts = [_Part(own if own.is_file() else rollout_file(folder, 0), device)]  # there were fewer processes, perhaps
    if parts[0].processes != args.data_processes:
        parts = [_Part(rollout_file(folder, number), device) for number in range(parts[0].processes)]
        trained = torch.stack([part.positions.view(part.updates, -1) for part in parts], 1).flatten()
        positions = order.of_process(trained, process)
    else:
        positions = parts[0].positions
    where = {position: (part, row) for part in parts for row, position in enumerate(part.positions.tolist())}
    found = [where[position] for position in positions.tolist()]
    advantages, old = (torch.stack([part.tensors[name][row] for part, row in found]) for name in SHARED)
    targets = None
    if f"targets.{ValueTargets.TENSORS[0]}" in parts[0].tensors:
        columns = {
            name: [part.tensors[f"targets.{name}"][row] for part, row in found] for name in ValueTargets.TENSORS
        }
        targets = ValueTargets(**{name: torch.stack(column) for name, column in columns.items()})
    weights = None
    if "weights" in parts[0].tensors:
        weights = torch.stack([part.tensors["weights"][row] for part, row in found])
    buffer = RolloutBuffer(
        rows_at(positions.tolist()),
        Recorded([part.sample(row) for part, row in found]),
        advantages,
        args.per_device_train_batch_size,
        order.seed,
        targets,
        positions,
        order.updates,
        weights,
    )
    buffer.old_log_probs = old
    return buffer


SHARED = ("advantages", "old_log_probs")  # one tensor for all samples of a file; a trajectory's are one a sample


class _Part:
    """What one process wrote."""

    def __init__(self, path: Path, device: Any):
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint lies within a rollout and cannot be resumed exactly.")
        # torch's "cpu:0", of several processes on CPUs, is no device to `safe_open`
        with refuse_unreadable(path.parent), safe_open(path, "pt") as file:
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name).to(device) for name in file.keys()}
            about = file.metadata()
        if "processes" not in about:
            raise ValueError(
                f"{path} was written before samples were kept by their position, in another order than today's; "
                "resume from a checkpoint between two rollouts, or with the version that wrote it."
            )
        self.positions = self.tensors["positions"].cpu()
        self.processes, self.updates = int(about["processes"]), int(about["updates"])
        self._kind, self._settings = KINDS[about["kind"]], json.loads(about["settings"])
        self._samples: list[dict[str, Tensor]] = [{} for _ in self.positions]
        for name, tensor in self.tensors.items():
            field, _, place = name.rpartition(".")
            if field and field != "targets":
                self._samples[int(place)][field] = tensor

    def sample(self, row: int) -> Trajectory | TokenTrajectory:
        """The trajectory of one sample."""
        return self._kind(**self._samples[row], **self._settings)
