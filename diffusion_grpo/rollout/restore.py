"""The rest of a rollout, read back from a checkpoint that lies within it.

`RolloutBuffer.save` wrote one file per process; there may be fewer or more processes now.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..algorithms.batch import Rows
from ..data.inputs import PipelineInputs
from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import Trajectory
from ..run.resume_point import refuse_unreadable
from .buffer import RolloutBuffer
from .order import RolloutOrder
from .value_model import ValueTargets

KINDS = {kind.__name__: kind for kind in (Trajectory, TokenTrajectory)}


def rollout_file(folder: Path, process: int) -> Path:
    """Return where a process keeps its part of the rollout that a checkpoint lies within."""
    return folder / f"rollout-rank{process}.safetensors"


def restore_buffer(
    folder: Path, order: RolloutOrder, inputs: PipelineInputs, rows_at: Callable[[list[int]], Rows], device: Any
) -> RolloutBuffer:
    """Restore this process's buffer, bit for bit; what other processes made is read from their files.

    Args:
        folder: of the checkpoint.
        order: of the rollout, for the processes there are now.
        inputs: of the pipeline's calls.
        rows_at: returns dataset rows by the samples' positions in the rollout.
        device: where trajectories are kept.

    Raises:
        ValueError: a file is missing.
    """
    sizes = order.sizes
    own = rollout_file(folder, sizes.data_process)
    parts = [_Part(own if own.is_file() else rollout_file(folder, 0), device)]  # perhaps there were fewer processes
    if parts[0].processes != sizes.data_processes:
        parts = [_Part(rollout_file(folder, number), device) for number in range(parts[0].processes)]
        trained = torch.stack([part.positions.view(part.updates, -1) for part in parts], 1).flatten()
        positions = order.own(trained)
    else:
        positions = parts[0].positions
    where = {position: (part, row) for part in parts for row, position in enumerate(part.positions.tolist())}
    found = [where[position] for position in positions.tolist()]

    def column(name: str) -> Tensor | None:
        if name not in parts[0].tensors:
            return None
        return torch.stack([part.tensors[name][row] for part, row in found])

    targets = {name: column(f"targets.{name}") for name in ValueTargets.TENSORS}
    buffer = RolloutBuffer(
        rows_at(positions.tolist()),
        [part.sample(row) for part, row in found],
        column("advantages"),
        inputs,
        sizes.micro_batch,
        order.seed,
        None if targets["states"] is None else ValueTargets(**targets),
        positions,
        order.updates,
        column("weights"),
        sizes.accumulation,
    )
    buffer.old_log_probs = column("old_log_probs")
    return buffer


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
        """Return the trajectory of one sample."""
        return self._kind(**self._samples[row], **self._settings)
