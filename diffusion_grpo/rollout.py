"""The pipeline is the policy: rollouts that record, replays that score.

In: a diffusers pipeline and the keyword arguments of its `__call__`. Out of `rollout`: its samples and a `Trajectory`.
Out of `replay`: the `StepDistribution` of one recorded step under the network as it is now, with gradient. No model
family has code here: guidance, packing and conditions are the pipeline's own in both, so that they cannot drift apart.
"""

import contextlib
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .prompt_cache import PromptCache
from .schedulers import DEFAULT_NOISE_LEVELS, log_density, stochastic_scheduler

POLICY_COMPONENTS = ("transformer", "unet", "prior", "decoder")


@dataclasses.dataclass
class Trajectory:
    """What a replay needs of a rollout: the trained steps, nothing else.

    Attributes:
        latents: (batch, steps, ...) float32, what entered each trained step.
        next_latents: (batch, steps, ...) float32, what left it, as rounded to the pipeline's dtype.
        log_probs: (batch, steps) float32, log-density of `next_latents`, averaged over its dimensions.
        steps: (batch, steps) int64, index of each trained step in the pipeline's loop, ascending.
        seeds: (batch,) int64, seed of each sample's step noise.
        initial_seeds: (batch,) int64, seed of each sample's initial latent.
        num_inference_steps: length of the pipeline's loop.
        noise_level: of the process, at the trained steps.
    """

    latents: Tensor
    next_latents: Tensor
    log_probs: Tensor
    steps: Tensor
    seeds: Tensor
    initial_seeds: Tensor
    num_inference_steps: int
    noise_level: float

    TENSORS = ("latents", "next_latents", "log_probs", "steps", "seeds", "initial_seeds")

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, rows: Any) -> "Trajectory":
        """The trajectory of some samples; `rows` indexes the batch dimension."""
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in self.TENSORS})

    @classmethod
    def cat(cls, parts: Sequence["Trajectory"]) -> "Trajectory":
        """One trajectory out of several with the same settings."""
        return dataclasses.replace(
            parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in cls.TENSORS}
        )


@dataclasses.dataclass
class StepDistribution:
    """The Gaussian that the policy draws one step from, and the recorded step's place in it.

    Attributes:
        mean: (batch, ...) float32.
        std: float32, broadcastable to `mean`.
        log_prob: (batch,) float32, of the recorded next latent, averaged over its dimensions.
    """

    mean: Tensor
    std: Tensor
    log_prob: Tensor


class Policy:
    """A pipeline seen as a policy. Holds what rollouts and replays share; the pipeline itself is left as it was.

    Args:
        pipe: any diffusers pipeline whose scheduler takes Gaussian steps.
        component: name of the trained network; by default the first of transformer, unet, prior, decoder.
        sde_type: see [`~diffusion_grpo.schedulers.stochastic_scheduler`].
        forward_context: entered around each real call of the network, e.g. `accelerator.autocast`.
        is_mixed_precision: whether that context computes in another dtype than it is given.

    Raises:
        ValueError: no such component, or an `sde_type` that does not fit.
        UnsupportedScheduler: the scheduler takes no Gaussian steps.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        component: str | None = None,
        sde_type: str = "auto",
        forward_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        is_mixed_precision: bool = False,
    ):
        self.pipe = pipe
        self.component = policy_component(pipe, component)
        self.scheduler = stochastic_scheduler(pipe.scheduler, sde_type)
        self.forward_context = forward_context
        self.is_mixed_precision = is_mixed_precision
        self.prompts = PromptCache()
        self.undecorated = inspect.unwrap(type(pipe).__call__)  # the original under torch.no_grad
        self._blank_outputs: dict[Any, Any] = {}

    @property
    def network(self) -> nn.Module:
        """The trained network, as the pipeline calls it."""
        return getattr(self.pipe, self.component)

    @contextlib.contextmanager
    def acting(self, driver: "_Recorder | _Teacher", forward: Callable | None = None) -> Iterator[None]:
        """The pipeline with stochastic scheduler, gated network and cached prompts; restored on leaving.

        Args:
            driver: what each scheduler step does, and whether the network must really run for it.
            forward: in place of the network's own forward, e.g. a reference model's.
        """
        pipe, network = self.pipe, self.network
        real = forward or network.forward

        def gate(*args, **kwargs):
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
            shapes = tuple((x.shape, x.dtype) for x in tensors)
            if not driver.needs_network(self.scheduler.index) and shapes in self._blank_outputs:
                return self._blank_outputs[shapes]
            with self.forward_context():
                output = real(*args, **kwargs)
            if self.is_mixed_precision:
                # autocast leaves half precision behind; the pipeline gets back the dtype of the latents it gave
                dtype = next(x.dtype for x in tensors if x.is_floating_point())
                output = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, output)
            self._blank_outputs[shapes] = _blank(output)
            return output

        progress = pipe.__dict__.get("_progress_bar_config")
        original_scheduler = pipe.scheduler
        self.scheduler.driver = driver
        with _replaced(network, "forward", gate), self.prompts.serving(pipe):
            # not setattr: a pipeline's own __setattr__ would write our class into its config
            pipe.__dict__.update(scheduler=self.scheduler, _progress_bar_config={"disable": True})
            try:
                yield
            finally:
                self.scheduler.driver = None
                pipe.__dict__.update(scheduler=original_scheduler, _progress_bar_config=progress)
                if progress is None:
                    del pipe.__dict__["_progress_bar_config"]


def _blank(output: Any) -> Any:
    """The shape of a network's output without its memory, for steps whose result is known already."""
    return pytree.tree_map_only(
        Tensor, lambda x: torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape), output
    )


def policy_component(pipe: DiffusionPipeline, component: str | None = None) -> str:
    """Name of the network that is trained: `component`, or the first usual one the pipeline has."""
    present = [name for name in POLICY_COMPONENTS if isinstance(getattr(pipe, name, None), nn.Module)]
    if component is None and present:
        return present[0]
    if component is not None and isinstance(getattr(pipe, component, None), nn.Module):
        return component
    raise ValueError(
        f"{type(pipe).__name__} has no network {component or ' or '.join(POLICY_COMPONENTS)!r}; set train_component "
        f"to one of its modules: {', '.join(k for k, v in pipe.components.items() if isinstance(v, nn.Module))}."
    )


@contextlib.contextmanager
def _replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute, put back afterwards exactly as it was: present or absent."""
    before = instance.__dict__.get(name)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del instance.__dict__[name]
        else:
            instance.__dict__[name] = before


class _Recorder:
    """Drives a rollout: noise where it is asked for, records where it is trained."""

    def __init__(self, seeds: Sequence[int], noise_steps: set[int], trained_steps: Tensor, noise_level: float, device):
        self.generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        self.noise_steps, self.trained_steps = noise_steps, trained_steps
        self.noise_level, self.device = noise_level, device
        self.records: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in seeds]

    def needs_network(self, index: int) -> bool:
        return True

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if index not in self.noise_steps:
            return scheduler.deterministic(prediction, timestep, sample)
        if len(sample) != len(self.generators):
            raise ValueError(
                f"The pipeline steps {len(sample)} latents at once where {len(self.generators)} samples were asked "
                "for; roll out one sample at a time (rollout_batch_size=1)."
            )
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        noise = torch.stack([torch.randn(sample.shape[1:], generator=generator) for generator in self.generators])
        latents = (mean + std * noise.to(mean.device)).to(sample.dtype)
        # scored as rounded: what replay is given back must be what was scored
        log_prob = log_density(latents.float(), mean, std)
        rows = (self.trained_steps == index).any(1).nonzero().flatten().tolist()
        for row in rows:
            record = (sample[row].float(), latents[row].float(), log_prob[row])
            self.records[row].append(tuple(x.to(self.device) for x in record))
        return latents

    def trajectory(self, **settings) -> Trajectory:
        count = self.trained_steps.shape[1]
        if any(len(record) != count for record in self.records):
            raise ValueError(
                f"The pipeline took {len(self.records[0])} of the {count} trained steps "
                f"{self.trained_steps[0].tolist()}; it makes fewer steps than num_inference_steps says."
            )
        latents, next_latents, log_probs = (
            torch.stack([torch.stack([step[i] for step in record]) for record in self.records]) for i in range(3)
        )
        return Trajectory(latents, next_latents, log_probs, steps=self.trained_steps, **settings)


class _StepScored(Exception):
    """Leaves the pipeline: the replayed step is scored, the steps after it and the decoder are not needed."""


class _Teacher:
    """Drives a replay: hands back what was recorded up to the replayed step, and scores that one."""

    def __init__(self, index: int, latents: Tensor, next_latents: Tensor, noise_level: float):
        self.index, self.noise_level = index, noise_level
        self.latents, self.next_latents = latents, next_latents
        self.scored: StepDistribution | None = None

    def needs_network(self, index: int) -> bool:
        return index == self.index

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if index < self.index:
            return self.latents.to(sample) if index == self.index - 1 else sample
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        next_latents = self.next_latents.to(device=mean.device, dtype=torch.float32)
        self.scored = StepDistribution(mean, std, log_density(next_latents, mean, std))
        raise _StepScored


def _generators(seeds: Tensor) -> list[torch.Generator]:
    """One a sample, on the CPU: what a sample gets depends on its seed alone, not on batch, process or device."""
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


def sample_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on all of `parts` and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def trained_steps(
    num_inference_steps: int, window: Sequence[int] | None = None, fraction: float = 1.0, seeds: Tensor | None = None
) -> list[list[int]]:
    """Which steps are trained. The last is never one: its std goes to 0.

    Args:
        num_inference_steps: length of the loop.
        window: [start, stop) of the steps that may be trained; all but the last by default.
        fraction: share of them that is trained, at least one step.
        seeds: (batch,) one a sample: each draws its own steps. Without, the first steps are taken, for one row.

    Returns:
        a row of ascending step indices a sample.
    """
    start, stop = window or (0, num_inference_steps - 1)
    count = max(1, round(fraction * (stop - start)))
    if seeds is None:
        return [list(range(start, start + count))]
    order = [torch.randperm(stop - start, generator=generator) for generator in _generators(seeds)]
    return [sorted((start + steps[:count]).tolist()) for steps in order]


@torch.no_grad()
def rollout(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    *,
    seeds: Sequence[int],
    num_inference_steps: int,
    initial_seeds: Sequence[int] | None = None,
    steps: Sequence[Sequence[int]] | None = None,
    noise_steps: Sequence[int] | None = None,
    noise_level: float | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Any, Trajectory | None]:
    """Calls the pipeline as a user would, with noise in its steps, and records the trained ones.

    Args:
        policy: a [`Policy`], or a pipeline to make one of.
        inputs: keyword arguments of the pipeline's `__call__` for one batch.
        seeds: one a sample. They fix the noise of its steps whatever else is in the batch.
        num_inference_steps: length of the loop.
        initial_seeds: one a sample, for its initial latent. Equal ones share the initial latent. By default `seeds`,
            and the noise of the steps comes from seeds derived from them, so that the two are independent.
        steps: trained steps, one row of ascending indices a sample; all but the last by default. Empty: none.
        noise_steps: steps that draw noise, at least the trained ones; all but the last by default.
        noise_level: of the process; its usual one by default. 0 samples deterministically and records nothing.
        device: where the trajectory is kept.

    Returns:
        the samples (what the pipeline returns first: PIL images, lists of frames, ...) and the trajectory, or None
        where nothing is recorded.
    """
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    seeds = torch.as_tensor(seeds, dtype=torch.int64)
    if initial_seeds is None:  # two streams: the same one twice would make the first noise the initial latent
        initial_seeds, seeds = seeds, torch.tensor([sample_seed(seed, "noise") for seed in seeds.tolist()])
    initial_seeds = torch.as_tensor(initial_seeds, dtype=torch.int64)
    noise_level = DEFAULT_NOISE_LEVELS[policy.scheduler.process] if noise_level is None else noise_level
    if steps is None:
        steps = trained_steps(num_inference_steps) * len(seeds)
    if noise_steps is None:
        noise_steps = range(num_inference_steps - 1)
    rows = torch.tensor([list(row) for row in steps], dtype=torch.int64).reshape(len(steps), -1)
    recorder = _Recorder(seeds, set(noise_steps) if noise_level > 0 else set(), rows, noise_level, device)
    with policy.acting(recorder):
        output = policy.pipe(
            **{"output_type": "pil", **inputs},
            num_inference_steps=num_inference_steps,
            generator=_generators(initial_seeds),
        )
    settings = dict(num_inference_steps=num_inference_steps, noise_level=noise_level)
    record = noise_level > 0 and rows.numel() > 0
    return output[0], recorder.trajectory(seeds=seeds, initial_seeds=initial_seeds, **settings) if record else None


def replay(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    trajectory: Trajectory,
    step: int,
    forward: Callable | None = None,
) -> StepDistribution:
    """Scores one recorded step under the network as it is now. Gradients flow where torch's grad mode lets them.

    Args:
        policy: as in [`rollout`].
        inputs: the same keyword arguments for the same samples.
        trajectory: of these samples, each with `step` among its trained steps.
        step: index of the step in the loop.
        forward: in place of the network's own forward, e.g. a reference model's.
    """
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    rows, columns = (trajectory.steps == step).nonzero(as_tuple=True)
    if len(rows) != len(trajectory):
        raise ValueError(f"step {step} was recorded for {len(rows)} of {len(trajectory)} samples; select those first.")
    teacher = _Teacher(
        step, trajectory.latents[rows, columns], trajectory.next_latents[rows, columns], trajectory.noise_level
    )
    with policy.acting(teacher, forward), contextlib.suppress(_StepScored):
        policy.undecorated(
            policy.pipe,
            **{"output_type": "pil", **inputs},
            num_inference_steps=trajectory.num_inference_steps,
            generator=_generators(trajectory.initial_seeds),
        )
    if teacher.scored is None:
        raise RuntimeError(f"{type(policy.pipe).__name__} ended before step {step}; it was not replayed.")
    return teacher.scored
