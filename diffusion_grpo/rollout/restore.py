"""Write a rollout into a checkpoint, and restore it, for runs that are resumed within its updates.

Each process writes a file; the number of processes may have changed when they are read. Everything that the replay of
the samples depends on must be the same then.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from ..algorithms.batch import Rows
from ..config.settings import describe
from ..data.inputs import PipelineInputs
from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import CleanSamples, Trajectory
from ..report.record import ResumeError, find_difference, publish, resolve_settings
from .buffer import RolloutBuffer
from .estimator import SampleAdvantages
from .plan import RolloutOrder
from .value_model import ValueTargets

# Settings that a replay depends on besides those that identify the run. Batch sizes change results only by rounding.
ROLLOUT_SETTINGS = ("loss_type", "step_interval", "temperature", "top_k", "top_p", "shuffle_dataset", "bf16", "fp16")
KINDS = {kind.__name__: kind for kind in (Trajectory, TokenTrajectory, CleanSamples)}


def rollout_file(folder: Path, process: int) -> Path:
    """Return the path of a process's share of the rollout in a checkpoint."""
    return folder / f"rollout-rank{process}.safetensors"


def save_buffer(buffer: RolloutBuffer, path: Path) -> None:
    """Write a buffer without its rows, which are read from the dataset again, and what its replay depends on."""
    samples, advantages = enumerate(buffer.samples), buffer.advantages
    tensors = {f"{name}.{i}": x.contiguous() for i, sample in samples for name, x in sample.tensors().items()}
    tensors |= {"advantages": advantages.values, "old_log_probs": buffer.old_log_probs.clone()}
    tensors["positions"] = buffer.positions
    if advantages.weights is not None:
        tensors["weights"] = advantages.weights
    if (targets := advantages.targets) is not None:
        tensors |= {f"targets.{name}": getattr(targets, name).contiguous() for name in ValueTargets.TENSORS}
    first, order = buffer.samples[0], buffer.order
    about: dict[str, Any] = {"kind": type(first).__name__, "settings": json.dumps(first.settings())}
    about |= {"made_under": json.dumps(describe_rollout(buffer.inputs))}
    about |= {"rows": json.dumps(hash_rows(buffer.rows, buffer.inputs))}
    counts = {"processes": str(order.sizes.data_processes), "updates": str(order.updates)}
    save_file(tensors, path, metadata=about | counts)


def restore_buffer(
    folder: Path, order: RolloutOrder, inputs: PipelineInputs, read_rows: Callable[[list[int]], Rows], device: Any
) -> RolloutBuffer:
    """Restore this process's buffer, bit for bit; samples that other processes made are read from their files."""
    sizes = order.sizes
    path = rollout_file(folder, sizes.data_process)
    # there may have been fewer processes
    shares = [_Share(path if path.is_file() else rollout_file(folder, 0), device)]
    check_rollout(folder, shares[0].made_under, inputs)
    if shares[0].processes != sizes.data_processes:
        shares = [_Share(rollout_file(folder, process), device) for process in range(shares[0].processes)]
        trained = torch.stack([share.positions.view(share.updates, -1) for share in shares], 1).flatten()
        positions = order.own(trained)
    else:
        positions = shares[0].positions
    where = {position: (share, index) for share in shares for index, position in enumerate(share.positions.tolist())}
    places = [where[position] for position in positions.tolist()]
    rows = read_rows([order.row_indices[position] for position in positions.tolist()])
    check_rows(folder, [share.rows[index] for share, index in places], rows, inputs)

    def column(name: str) -> Tensor | None:
        if name not in shares[0].tensors:
            return None
        values = [share.tensors[name][index] for share, index in places]
        if name == "old_log_probs":  # of texts, as long as the longest in their file
            longest = max(value.shape[-1] for value in values)
            values = [functional.pad(value, (0, longest - value.shape[-1])) for value in values]
        return torch.stack(values)

    targets = {name: column(f"targets.{name}") for name in ValueTargets.TENSORS}
    advantages = SampleAdvantages(
        column("advantages"), None if targets["states"] is None else ValueTargets(**targets), column("weights")
    )
    samples = [share.sample(index) for share, index in places]
    if isinstance(samples[0], TokenTrajectory):  # as long as the longest in their files
        samples = TokenTrajectory.align(samples)
    buffer = RolloutBuffer(rows, samples, advantages, inputs, order, positions)
    buffer.old_log_probs = column("old_log_probs")
    return buffer


class _Share:
    """The samples that one process wrote, the settings they were made under, and hashes of their rows."""

    def __init__(self, path: Path, device: Any):
        if not path.is_file():
            raise ResumeError(f"{path} is missing: the checkpoint was saved in the middle of a rollout.")
        # `safe_open` does not know torch's "cpu:0", the device of one of several processes on CPUs
        with safe_open(path, "pt") as file:
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


def describe_rollout(inputs: PipelineInputs) -> dict[str, Any]:
    """Return everything that the replay of a rollout depends on: settings and arguments of pipeline calls."""
    args = inputs.args
    made_under = {name: getattr(args, name) for name in ROLLOUT_SETTINGS} | resolve_settings(args)
    made_under["data_seed"] = args.seed if args.data_seed is None else args.data_seed
    made_under["updates per rollout"] = args.batch_sizes.updates_per_rollout
    is_apart = args.multi_objective_aggregation == "loss_per_reward"  # else a sample has one advantage
    made_under["multi_objective_aggregation"] = "loss_per_reward" if is_apart else "one advantage per sample"
    calls = {name: None if it.default is it.empty else it.default for name, it in inputs.parameters.items()}
    for name, value in (calls | inputs.fixed).items():
        made_under[f"pipeline_kwargs: {name}" if name in made_under else name] = _sum_up(value)
    return publish(made_under)


def hash_rows(rows: Rows, inputs: PipelineInputs) -> list[str]:
    """Return a hash of each row's inputs; of images and videos only the sizes count, since decoders round pixels."""
    hashes: dict[int, str] = {}  # samples of a prompt share one row
    for row in rows:
        if id(row) not in hashes:
            taken = {name: row[name] for name in sorted({"prompt", *inputs.accepted} & row.keys())}
            hashes[id(row)] = _hash(json.dumps(_sum_up(taken)).encode())
    return [hashes[id(row)] for row in rows]


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
    if hashes != hash_rows(rows, inputs):
        raise ResumeError(
            f"{checkpoint} was saved in the middle of a rollout of other dataset rows; resume with the earlier "
            "dataset, or from a checkpoint between two rollouts."
        )


def _sum_up(value: Any) -> Any:
    """Make a value serialisable as JSON like `describe`, with a hash of the contents of a tensor or array."""
    if isinstance(value, dict):
        return {str(name): _sum_up(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sum_up(item) for item in value]
    content = value.detach().cpu().flatten().view(torch.uint8).numpy() if torch.is_tensor(value) else value
    return f"{describe(value)} {_hash(content.tobytes())}" if isinstance(content, np.ndarray) else describe(value)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
