"""Restore a rollout from a checkpoint that was written within it.

`RolloutBuffer.save` wrote one file per process; the number of processes may have changed since.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from ..algorithms.batch import Rows
from ..data.inputs import PipelineInputs
from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import CleanSamples, Trajectory
from ..run.resume_point import refuse_unreadable
from ..run.resume_settings import check_rollout, check_rows
from .buffer import RolloutBuffer
from .order import RolloutOrder
from .value_model import ValueTargets

KINDS = {kind.__name__: kind for kind in (Trajectory, TokenTrajectory, CleanSamples)}


def rollout_file(folder: Path, process: int) -> Path:
    """Return the path of a process's share of the rollout in a checkpoint."""
    return folder / f"rollout-rank{process}.safetensors"


def restore_buffer(
    folder: Path, order: RolloutOrder, inputs: PipelineInputs, rows_at: Callable[[list[int]], Rows], device: Any
) -> RolloutBuffer:
    """Restore this process's buffer, bit for bit; samples that other processes made are read from their files."""
    sizes = order.sizes
    own = rollout_file(folder, sizes.data_process)
    shares = [_Share(own if own.is_file() else rollout_file(folder, 0), device)]  # there may have been fewer processes
    check_rollout(folder, shares[0].made_under, inputs)
    if shares[0].processes != sizes.data_processes:
        shares = [_Share(rollout_file(folder, process), device) for process in range(shares[0].processes)]
        trained = torch.stack([share.positions.view(share.updates, -1) for share in shares], 1).flatten()
        positions = order.own(trained)
    else:
        positions = shares[0].positions
    where = {position: (share, index) for share in shares for index, position in enumerate(share.positions.tolist())}
    found = [where[position] for position in positions.tolist()]
    rows = rows_at(positions.tolist())
    check_rows(folder, [share.rows[index] for share, index in found], rows, inputs)

    def column(name: str) -> Tensor | None:
        if name not in shares[0].tensors:
            return None
        values = [share.tensors[name][index] for share, index in found]
        if name == "old_log_probs":  # of texts, as long as the longest in their file
            longest = max(value.shape[-1] for value in values)
            values = [functional.pad(value, (0, longest - value.shape[-1])) for value in values]
        return torch.stack(values)

    targets = {name: column(f"targets.{name}") for name in ValueTargets.TENSORS}
    buffer = RolloutBuffer(
        rows,
        [share.sample(index) for share, index in found],
        column("advantages"),
        inputs,
        sizes.micro_batch,
        order.seed,
        None if targets["states"] is None else ValueTargets(**targets),
        positions,
        order.updates,
        column("weights"),
        sizes.accumulation,
        sizes.num_generations,
        sizes.trained_per_prompt,
    )
    buffer.old_log_probs = column("old_log_probs")
    return buffer


class _Share:
    """The samples that one process wrote, the settings they were made under, and hashes of their rows."""

    def __init__(self, path: Path, device: Any):
        if not path.is_file():
            raise ValueError(
                f"{path} is missing: the checkpoint was saved in the middle of a rollout and cannot be resumed "
                "exactly."
            )
        # `safe_open` does not know torch's "cpu:0", the device of one of several processes on CPUs
        with refuse_unreadable(path.parent), safe_open(path, "pt") as file:
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name).to(device) for name in file.keys()}
            about = file.metadata()
        self.positions = self.tensors["positions"].cpu()
        self.processes, self.updates = int(about["processes"]), int(about["updates"])
        self._kind, self._settings = KINDS[about["kind"]], json.loads(about["settings"])
        self.made_under, self.rows = (json.loads(about[name]) for name in ("made_under", "rows"))
        self._samples: list[dict[str, Tensor]] = [{} for _ in self.positions]
        for name, tensor in self.tensors.items():
            field, _, index = name.rpartition(".")
            if field and field != "targets":
                self._samples[int(index)][field] = tensor

    def sample(self, index: int) -> Trajectory | TokenTrajectory | CleanSamples:
        """Return the trajectory of one sample."""
        return self._kind(**self._samples[index], **self._settings)
