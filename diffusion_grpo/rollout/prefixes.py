"""Compute once the denoising steps that samples share: those from one initial latent up to the first noise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..algorithms.batch import Rows
from ..data.inputs import PipelineInputs
from ..distributed.backend import DistributedBackend
from ..policy.base import Policy
from ..policy.rollout import run_prefix
from ..policy.trajectory import Prefix

Calls = list[list[int]]


def compute_prefixes(
    policy: Policy,
    inputs: PipelineInputs,
    backend: DistributedBackend,
    rows: Rows,
    calls: Calls,
    *,
    initial_seeds: Tensor,
    lengths: list[int],
    num_inference_steps: int,
    device: str | torch.device,
) -> Callable[[list[int]], Prefix]:
    """Take the shared steps of a process's samples once per initial latent, and predict the step after them.

    Latents that share a call in the rollout also share a call here. A micro-batch with the same latents makes the same
    call in a replay, so that its prediction is the same bit for bit.

    Args:
        initial_seeds: `(samples,)` int64, equal where samples share their initial latent.
    """
    seeds, first_of, shared = initial_seeds.tolist(), {}, []
    for call in calls:
        new = {seeds[index]: index for index in reversed(call) if seeds[index] not in first_of}
        first_of |= new
        shared += [sorted(new.values())] if new else []
    found: dict[int, Prefix] = {}
    for indices, _ in backend.equalize(shared):  # a repeated call gives the same latents
        prefix = run_prefix(
            policy,
            inputs([rows[index] for index in indices]),
            lengths[indices[0]],
            num_inference_steps=num_inference_steps,
            initial_seeds=initial_seeds[indices],
            device=device,
        )
        found |= {index: prefix[[number]] for number, index in enumerate(indices)}
    return lambda indices: Prefix.cat([found[first_of[seeds[index]]] for index in indices])


def split_by_length(calls: Calls, lengths: list[Any]) -> Calls:
    """Split pipeline calls so that all samples of a call branch at the same step."""
    return [
        [index for index in call if lengths[index] == length]
        for call in calls
        for length in dict.fromkeys(lengths[index] for index in call)
    ]
