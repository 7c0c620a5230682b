"""Data that the stages exchange: requests, trajectories, step distributions; the scales and weights of steps; seeds.

A rollout records a `Trajectory`, the buffer keeps it, and each replay reads it and returns a `StepDistribution`. For
losses on re-noised samples, the rollout keeps `CleanSamples` instead, from which each pass makes a `Denoised`.
They measure themselves: divergence, errors of predictions, what half precision may change. No pipeline is needed.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

ROUNDING = 0.25  # share of its size by which half precision may change a prediction, guidance included
# Share of its size by which a prediction without guidance may differ between two passes in half precision with the
# same inputs: 8 times the epsilon of bfloat16; see docs/how_it_works.md.
ROUNDING_OF_TWO = 8 * 2.0**-7


@dataclasses.dataclass
class SampleTensors:
    """Tensors with one row per sample, and settings that all samples share."""

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, rows: Any) -> "SampleTensors":
        """Return the records of some samples; `rows` indexes the batch dimension."""
        return dataclasses.replace(self, **{name: tensor[rows] for name, tensor in self.tensors().items()})

    @classmethod
    def cat(cls, parts: Sequence["SampleTensors"]) -> "SampleTensors":
        """Join several objects with the same settings."""
        return dataclasses.replace(
            parts[0], **{name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
        )

    def to(self, device: str | torch.device) -> "SampleTensors":
        """Return a copy on another device."""
        return dataclasses.replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors with one row per sample, by name."""
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value)}

    def settings(self) -> dict[str, int | float]:
        """Return the settings that all samples share, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}

    def metrics(self) -> dict[str, float]:
        """Return metrics of a rollout."""
        return {}

    def perturb(self) -> "SampleTensors":
        """Return the samples with noise, equal for all, in their latents, if they have any."""
        name = "entered" if "entered" in self.tensors() else "latents"
        latents = self.tensors().get(name)
        if latents is None:
            return self
        noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(0))
        return dataclasses.replace(self, **{name: latents + 0.01 * latents.std() * noise.to(latents)})

    def over_steps(self, values: Tensor) -> Tensor:
        """Average (batch, steps) values over steps; return (batch,)."""
        return values.mean(1)


@dataclasses.dataclass
class Trajectory(SampleTensors):
    """What a replay needs from a rollout: only the trained steps.

    Attributes:
        latents: (batch, steps, ...) float32, input of each trained step: the output of the step before it, or the
            initial latent. Where a pipeline edits latents between steps, it does so again in the replay.
        next_latents: (batch, steps, ...) float32, output of each trained step, as rounded to the pipeline's dtype.
            If a step moves several latents (video and audio), both hold all of them, flattened and joined.
        log_probs: (batch, steps) float32, log-density of `next_latents`, averaged over its dimensions.
        steps: (batch, steps) int64, index of each trained step in the pipeline's loop, ascending.
        seeds: (batch,) int64, seed of each sample's step noise.
        initial_seeds: (batch,) int64, seed of each sample's initial latent.
        num_inference_steps: length of the pipeline's loop.
        noise_level: noise level of the SDE at the trained steps.
        tokens: (batch, tokens) int64 tokens that a language model in the pipeline's call wrote; None if there are
            none.
        step_weights: (batch, steps) float32, factors of the policy term; None if all are 1.
        means: (batch, steps, ...) float32, mean of each trained step under the policy that made the rollout; None if
            the loss does not need it.
        shared_steps: (batch,) int64, the step whose network call a sample shared with all samples of its initial
            latent; None if each sample made its own call.
        finished: (batch, ...) float32, output of the last step; None if the algorithm does not need it.

    Examples:
        >>> _, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4)
        >>> len(trajectory), len(trajectory[:1]), trajectory.steps.tolist()
        (2, 1, [[0, 1, 2], [0, 1, 2]])
    """

    latents: Tensor
    next_latents: Tensor
    log_probs: Tensor
    steps: Tensor
    seeds: Tensor
    initial_seeds: Tensor
    num_inference_steps: int
    noise_level: float
    tokens: Tensor | None = None
    step_weights: Tensor | None = None
    means: Tensor | None = None
    shared_steps: Tensor | None = None
    finished: Tensor | None = None


@dataclasses.dataclass
class CleanSamples(SampleTensors):
    """The finished samples of a rollout without noise in its steps, for losses on re-noised samples.

    Attributes:
        latents: (batch, ...) float32, output of the last step, in the scheduler's own coordinates. If a step moves
            several latents (video and audio), all of them, flattened and joined.
        steps: (batch, steps) int64, index in the pipeline's loop of each step at which the sample is trained,
            ascending. Step 0 is not possible, because no step before it could return the noised sample.
        seeds: (batch,) int64, seed of the noise that is added to each sample. Samples with equal seeds share the
            noise.
        initial_seeds: (batch,) int64, seed of each sample's initial latent.
        num_inference_steps: length of the pipeline's loop.
        tokens: (batch, tokens) int64 tokens that a language model in the pipeline's call wrote; None if there are
            none.
        old_clean: (batch, steps, ...) float32, the clean sample that the old policy predicts at each of `steps`; None
            without an old policy.
        entered: (batch, ...) float32, input of the only one of `steps`, from which on a loss with gradients of rewards
            takes the steps again; None for the others.

    Examples:
        >>> _, samples = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4, keeps_clean=True)
        >>> samples.latents.shape, samples.steps.tolist()
        (torch.Size([2, 6, 8, 24]), [[1, 2, 3], [1, 2, 3]])
    """

    step_weights: ClassVar[None] = None  # only recorded steps have weights,
    shared_steps: ClassVar[None] = None  # and only their network calls are shared

    latents: Tensor
    steps: Tensor
    seeds: Tensor
    initial_seeds: Tensor
    num_inference_steps: int
    tokens: Tensor | None = None
    old_clean: Tensor | None = None
    entered: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Zeros, (batch, steps), since the steps towards a clean sample are not recorded."""
        return torch.zeros(self.steps.shape, dtype=torch.float64, device=self.latents.device)


@dataclasses.dataclass
class Denoised:
    """The clean samples that the policy predicts from re-noised ones.

    Attributes:
        clean: (batch, ...) float32, the predicted clean sample, with gradient.
        target: (batch, ...) float32, the sample itself, in the same coordinates.
        sigma: how much of the noised sample is noise, between 0 and 1, broadcastable to `clean`: sigma for flow
            matching, sqrt(1 - alpha) for variance-preserving schedules, sigma / sqrt(1 + sigma^2) for EDM.
        origin: (batch, ...) float32, chosen so that the prediction is `v = (origin - clean) / sigma`: the velocity for
            flow matching, v-prediction for variance-preserving schedules.
        moves: (batch, ...) bool, False for elements that the pipeline holds fixed (conditions, first frames, the part
            outside an inpainting mask) and that therefore do not count; None if all count.
        clean_at_zero: (batch, ...) float32, the clean sample that follows from a prediction of 0; None if it is
            `origin`, as for flow matching.

    Examples:
        >>> ones = torch.ones(1, 4)
        >>> Denoised(clean=0 * ones, target=ones, sigma=torch.tensor(0.5), origin=ones).error().item()
        4.0
    """

    clean: Tensor
    target: Tensor
    sigma: Tensor
    origin: Tensor
    moves: Tensor | None = None
    clean_at_zero: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return the (batch,) mean of `values`, shaped like `clean`, over the elements that move; float64."""
        if self.moves is None:
            return values.flatten(1).double().mean(1)
        moves = self.moves.flatten(1)
        return (values.flatten(1).double() * moves).sum(1) / moves.sum(1).clamp(min=1)

    def error(self, other: Tensor | None = None) -> Tensor:
        """Return the (batch,) mean squared error of `v` to the target, or to another clean sample; float64."""
        other = self.target if other is None else other.to(self.clean)
        return self.mean(((self.clean - other) / self.sigma) ** 2)

    def norm(self) -> Tensor:
        """Return the (batch,) root mean square of `v`; float64, without gradient."""
        return self.mean(((self.origin - self.clean.detach()) / self.sigma) ** 2).sqrt()

    def compare(self, reference: "Denoised") -> dict[str, Tensor]:
        """Return the (batch,) ratio of the norm of `v` to that of the reference, as `velocity/ratio_to_ref`."""
        return {"velocity/ratio_to_ref": self.norm() / reference.norm().clamp(min=1e-12)}

    @property
    def prediction(self) -> Tensor:
        """The network's own prediction up to its sign, (batch, ...) in units of `v`, without gradient.

        It is `v` for flow matching, and differs if `v` contains a part of the noised sample (noise prediction, EDM).
        """
        still = self.origin if self.clean_at_zero is None else self.clean_at_zero
        return (self.clean.detach() - still) / self.sigma

    def size(self) -> Tensor:
        """Return the (batch,) root mean square of the network's own prediction; float64, without gradient.

        If the prediction changes by a share of its size, `v` changes by the same share of this value.
        """
        return self.mean(self.prediction**2).sqrt().clamp(min=1e-12)

    @torch.no_grad()
    def difference(self, other: Tensor) -> Tensor:
        """Return the (batch,) distance of the prediction from that of another clean sample, relative to its size."""
        return self.error(other).sqrt() / self.size()

    @torch.no_grad()
    def least_difference(self, error: Tensor) -> Tensor:
        """Return a (batch,) lower bound of `difference` to a prediction of which only the `error` is known."""
        # the triangle inequality
        return (self.error().sqrt() - error.to(self.size()).sqrt()).abs() / self.size()


@dataclasses.dataclass
class Finished:
    """Samples whose last steps were taken again."""

    pixels: Tensor | None  # (batch, 3, height, width) or (batch, frames, 3, height, width) in [0, 1]
    latents: Tensor  # (batch, ...) float32

    def distance(self, other: "Finished") -> Tensor:
        """Return the (batch,) mean squared distance of the latents."""
        return (self.latents - other.latents).square().flatten(1).mean(1)


@dataclasses.dataclass
class StepScale:
    """The scale of a step's noise and of the effect of its prediction, as means over the elements that move.

    Elements that a pipeline holds fixed (a first frame, tokens of a condition) do not count.

    Attributes:
        std: (batch,) float32, standard deviation of the next latent.
        jacobian: (batch,) float32, |d mean / d prediction|, a single number because each mean is linear in the
            prediction. Clipping in a scheduler's config is ignored.
        moving: (batch,) float32, number of elements that move.

    Examples:
        >>> video = StepScale(torch.tensor([0.3]), torch.tensor([0.1]), moving=torch.tensor([300.0]))
        >>> sound = StepScale(torch.tensor([0.7]), torch.tensor([0.1]), moving=torch.tensor([100.0]))
        >>> round(StepScale.join([video, sound]).std.item(), 3)
        0.4
    """

    std: Tensor
    jacobian: Tensor
    moving: Tensor

    @classmethod
    def join(cls, parts: Sequence["StepScale"]) -> "StepScale":
        """Average over the latents that one step moves, weighted by their sizes."""
        if len(parts) == 1:
            return parts[0]
        moving = sum(part.moving for part in parts)
        std, jacobian = (
            sum(getattr(part, name) * part.moving for part in parts) / moving for name in ("std", "jacobian")
        )
        return cls(std, jacobian, moving)


# Weights of the policy term per recorded step, which make steps with different noise count equally. The gradient of a
# step is proportional to |jacobian| / std, and differs by a factor of up to thirty between the steps of one schedule.
# To add a weight, write a function from the scale of a step and those of all trainable steps, and an entry below.


def noise(own: StepScale, every: Sequence[StepScale]) -> Tensor:
    """Return 2.25 * std: steps with more room to explore count more (TempFlow-GRPO, 2508.04324)."""
    return 2.25 * own.std


def velocity(own: StepScale, every: Sequence[StepScale]) -> Tensor:
    """Return std / |J|, divided by its mean over the steps that may be trained (Flash-GRPO, 2605.15980).

    The gradient with respect to the prediction is then as large at each step.
    """
    return guard(own, every) / torch.stack([guard(each, every) for each in every]).mean(0)


def guard(own: StepScale, every: Sequence[StepScale]) -> Tensor:
    """Return std / |J|, the weight of GRPO-Guard (2510.22319) at a ratio of 1; like `velocity`, but not normalised."""
    return own.std / own.jacobian


# by the value of the setting `step_weight`, in whose annotation they stand too
STEP_WEIGHTS: dict[str, Callable[[StepScale, Sequence[StepScale]], Tensor] | None] = {
    "none": None,
    "noise": noise,
    "velocity": velocity,
    "guard": guard,
}


def weigh_steps(name: str, scales: dict[int, StepScale], steps: Tensor) -> Tensor | None:
    """Return the (batch, steps) float32 weights of the trained steps, (batch, steps) int64; None for "none"."""
    weight = STEP_WEIGHTS[name]
    if weight is None:
        return None
    every = list(scales.values())
    by_step = {step: weight(scale, every).float().cpu() for step, scale in scales.items()}
    rows = [[by_step[step][row] for step in columns] for row, columns in enumerate(steps.tolist())]
    return torch.stack([torch.stack(row) for row in rows])


@dataclasses.dataclass
class Prefix(SampleTensors):
    """The result of a loop's first steps, taken without noise, from which samples branch.

    Attributes:
        latents: (batch, ...) float32, output of step `length` - 1, or the initial latent; if a step moves several
            latents, all of them, flattened and joined.
        initial_seeds: (batch,) int64, seed of each initial latent.
        length: number of steps taken.
        prediction: (batch, elements) what the pipeline hands to the scheduler in step `length`, flattened; it is the
            same for all samples that branch there. None if each sample makes that network call itself.
        tokens: (batch, tokens) int64 tokens that a language model in the pipeline's call wrote; None if there are
            none.

    Examples:
        >>> one = inputs | {"prompt": inputs["prompt"][:1]}
        >>> prefix = run_prefix(pipe, one, 1, num_inference_steps=4, initial_seeds=[0])
        >>> prefix.length, len(prefix)
        (1, 1)
    """

    latents: Tensor
    initial_seeds: Tensor
    length: int
    prediction: Tensor | None = None
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.initial_seeds)


@dataclasses.dataclass(frozen=True)
class RolloutRequest:
    """A request for a rollout, with (batch,) int64 seeds; see [`~diffusion_grpo.policy.rollout.rollout`]."""

    seeds: Tensor
    initial_seeds: Tensor
    num_inference_steps: int
    steps: Sequence[Sequence[int]] | None = None
    noise_steps: Sequence[Sequence[int]] | None = None
    noise_in_last_step: bool = False
    noise_level: float | None = None
    device: str | torch.device = "cpu"
    is_complete: bool = True
    latents: list[Tensor] | None = None
    is_decoded: bool = True
    keeps: Literal["steps", "clean", "entered"] = "steps"
    step_weight: str = "none"
    weighted_steps: Sequence[int] | None = None
    keeps_means: bool = False
    keeps_finished: bool = False
    prefix: "Prefix | None" = None


@dataclasses.dataclass
class StepDistribution:
    """The Gaussian from which the policy draws one step, and the log-probability of the recorded step.

    Attributes:
        mean: (batch, ...) float32, mean of the next latent.
        std: float32, standard deviation of the next latent, broadcastable to `mean`.
        log_prob: (batch,) float32, log-probability of the recorded next latent, averaged over its dimensions.
        scale: scale of the noise and of the prediction's effect.
        prediction: (batch, ...) what the pipeline handed to the scheduler, without gradient.
        velocity: (batch, ...) float32, the prediction as `v`, without gradient; see [`Denoised`].

    Examples:
        >>> step = StepDistribution(torch.zeros(1, 4), torch.tensor(0.5), log_prob=torch.zeros(1))
        >>> step.divergence(torch.ones(1, 4)).item()
        2.0
    """

    mean: Tensor
    std: Tensor
    log_prob: Tensor
    scale: StepScale | None = None
    prediction: Tensor | None = None
    velocity: Tensor | None = None

    def loss_inputs(self, reference: "StepDistribution | None") -> dict[str, Tensor | None]:
        """Return the inputs of a loss in addition to the log-probability."""
        inputs = {"mean": self.mean, "std": self.std, "ref_mean": reference and reference.mean}
        if self.scale is not None:
            inputs |= {"noise": self.scale.std, "jacobian": self.scale.jacobian, "moving": self.scale.moving}
        return inputs

    def divergence(self, mean: Tensor) -> Tensor:
        """Return the (batch,) KL divergence from a step with another mean, averaged over the elements that move."""
        square = ((self.mean - mean) ** 2 / (2 * self.std**2)).flatten(1)
        return square.mean(1) if self.scale is None else square.sum(1) / self.scale.moving

    @torch.no_grad()
    def rounding(self) -> Tensor:
        """Return how far half precision may move each sample's ratio from 1, (batch,).

        If a replay's prediction differs by d from the rollout's, the log-probability of x = mean + std * e differs by
        r * mean(e * d) - r**2 / 2 * mean(d**2), with r = |J| / std. The first term is random, and its standard
        deviation, r * rms(d) / sqrt(n), falls with the number n of dimensions; the second term does not. The bound
        allows six of these standard deviations, and an rms(d) of `ROUNDING` times that of the prediction. See
        docs/how_it_works.md.
        """
        size = self.prediction.float().flatten(1).square().mean(1).sqrt()
        reach = self.scale.jacobian / self.scale.std * ROUNDING * size
        return (reach**2 / 2 + 6 * reach / self.scale.moving.sqrt()).expm1()

    @torch.no_grad()
    def compare(self, reference: "StepDistribution") -> dict[str, Tensor]:
        """Return the (batch,) ratio of the norm of `v` to that of the reference, as `velocity/ratio_to_ref`."""
        if self.velocity is None or reference.velocity is None:
            return {}
        norm, other = (step.velocity.flatten(1).norm(dim=1) for step in (self, reference))
        return {"velocity/ratio_to_ref": norm / other.clamp(min=1e-12)}


def first_of_each(sources: Tensor) -> Tensor:
    """Return, for each row that samples share, the index of the first sample in (batch,) `sources` that uses it."""
    return torch.stack([(sources == row).nonzero()[0, 0] for row in range(int(sources.max()) + 1)])


def make_generators(seeds: Tensor) -> list[torch.Generator]:
    """Return one CPU generator per sample, so that a sample depends on its seed, but not on its batch or device."""
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


def sample_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on all of `parts` and on nothing else.

    Examples:
        >>> sample_seed(42, "rollout", 0) == sample_seed(42, "rollout", 0) != sample_seed(42, "rollout", 1)
        True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
