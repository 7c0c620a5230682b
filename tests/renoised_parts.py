"""Parts of re-noised samples without a pipeline: predictions are tensors, so that losses can be computed by hand.

For the tests of algorithms on re-noised samples. `problem` draws everything at random, in float64; `mean` and
`squares` are the two sums that their formulas are made of, written without the library.
"""

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor

from diffusion_grpo.algorithms.batch import Part
from diffusion_grpo.policy.trajectory import CleanSamples, Denoised

SHAPE = (3, 4)
STEPS = [1, 3]


class Stub:
    """A policy or reference whose prediction for the sample of seed i is row i of `clean`, at every step."""

    component = ("transformer",)

    def __init__(self, clean: Tensor, target: Tensor, sigma: Tensor, origin: Tensor, moves: Tensor | None):
        self.clean, self.target, self.sigma, self.origin, self.moves = clean, target, sigma, origin, moves
        self.calls: list[tuple[list[int], int]] = []

    def denoise(self, inputs, samples, step):
        rows = samples.seeds
        self.calls.append((rows.tolist(), step))
        sigma = self.sigma[rows] if self.sigma.ndim else self.sigma
        moves = None if self.moves is None else self.moves[rows]
        return Denoised(self.clean[rows], self.target[rows], sigma, self.origin[rows], moves)


def problem(
    count: int = 6,
    group_size: int = 3,
    is_masked: bool = False,
    sigma_by_element: bool = False,
    has_old: bool = False,
    has_weights: bool = False,
    advantages: list[float] | None = None,
    distance: float = 0.3,
    seed: int = 0,
) -> SimpleNamespace:
    """Random samples, what the policy, the reference and the old policy take them for, and the part of them all.

    Args:
        count: of samples.
        group_size: samples of each prompt.
        is_masked: whether some elements are held fixed.
        sigma_by_element: whether the share of noise differs between elements, or is one number.
        has_old: whether there is an old policy, else it is the policy.
        has_weights: whether samples weigh differently.
        advantages: of the samples, by default random.
        distance: of the predictions from the samples.
        seed: of all that is random.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    target = normal(count, *SHAPE)
    clean = (target + distance * normal(count, *SHAPE)).requires_grad_()
    sigma = torch.rand(count, *SHAPE, generator=draw, dtype=torch.float64) * 0.6 + 0.3
    sigma = sigma if sigma_by_element else torch.tensor(0.7, dtype=torch.float64)
    moves = torch.rand(count, *SHAPE, generator=draw) < 0.6
    moves[:, 0, 0] = True
    common = {"target": target, "sigma": sigma, "origin": normal(count, *SHAPE), "moves": moves if is_masked else None}
    old = torch.stack([target + distance * normal(count, *SHAPE) for _ in STEPS], dim=1)
    samples = CleanSamples(
        latents=target,
        steps=torch.tensor([STEPS] * count),
        seeds=torch.arange(count),
        initial_seeds=torch.arange(count),
        num_inference_steps=4,
        old_clean=old if has_old else None,
    )
    part = Part(
        rows=[{} for _ in range(count)],
        trajectory=samples,
        advantages=torch.tensor(advantages, dtype=torch.float64) if advantages else 2 * normal(count),
        old_log_probs=torch.zeros(count, len(STEPS), dtype=torch.float64),
        make_inputs=lambda rows: {},
        weights=torch.rand(count, generator=draw, dtype=torch.float64) if has_weights else None,
        groups=torch.arange(count) // group_size + 5,
        group_size=group_size,
    )
    return SimpleNamespace(
        part=part,
        policy=Stub(clean, **common),
        reference=Stub(target + distance * normal(count, *SHAPE), **common),
        clean=clean,
        old=old[:, STEPS.index(3)] if has_old else clean.detach(),  # at step 3, where tests train
        weights=part.weights if has_weights else torch.ones(count, dtype=torch.float64),
        advantages=part.advantages,
        **common,
    )


def mean(given: SimpleNamespace, values: Tensor) -> Tensor:
    """Mean of each sample over the elements that move, one by one."""
    moves = torch.ones_like(given.target, dtype=torch.bool) if given.moves is None else given.moves
    return torch.stack([row[kept].mean() for row, kept in zip(values, moves, strict=True)])


def squares(given: SimpleNamespace, clean: Tensor, other: Tensor | None = None) -> Tensor:
    """Mean squared error of the prediction v that goes with a clean sample, to that of the sample or another."""
    velocity, aim = (given.origin - clean) / given.sigma, given.target if other is None else other
    return mean(given, (velocity - (given.origin - aim) / given.sigma) ** 2)


def gradient(loss: Tensor, given: SimpleNamespace) -> Tensor:
    """Gradient of a loss by the policy's prediction."""
    return torch.autograd.grad(loss, given.clean, retain_graph=True)[0]


def changed(given: SimpleNamespace, **fields) -> Part:
    """The part with other fields."""
    return dataclasses.replace(given.part, **fields)
