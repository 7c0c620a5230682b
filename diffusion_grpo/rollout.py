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

from .processes import DEFAULT_NOISE_LEVELS, log_density
from .prompt_cache import PromptCache
from .schedulers import StochasticScheduler, stochastic_scheduler

POLICY_COMPONENTS = ("transformer", "unet", "prior", "decoder")


@dataclasses.dataclass
class Trajectory:
    """What a replay needs of a rollout: the trained steps, nothing else.

    Attributes:
        latents: (batch, steps, ...) float32, what each trained step was handed: what the step before it left, or the
            initial latent. Where a pipeline edits latents between steps, it does so again in the replay.
        next_latents: (batch, steps, ...) float32, what left the trained step, as rounded to the pipeline's dtype.
            Where a step moves several latents (video and audio), both hold all of them, flattened one after the other.
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


class UnsupportedPipeline(ValueError):
    """The pipeline's steps cannot be recorded and replayed one by one."""


class Policy:
    """A pipeline seen as a policy. Holds what rollouts and replays share; the pipeline itself is left as it was.

    Args:
        pipe: any diffusers pipeline whose scheduler takes Gaussian steps.
        component: name of the trained network, or several joined by ", "; by default the first of transformer, unet,
            prior, decoder, with its second expert where the pipeline has one (`transformer_2`).
        sde_type: see [`~diffusion_grpo.schedulers.stochastic_scheduler`].
        forward_context: entered around each real call of the network, e.g. `accelerator.autocast`.
        is_mixed_precision: whether that context computes in another dtype than it is given.

    Raises:
        ValueError: no such component, or an `sde_type` that does not fit.
        UnsupportedPipeline: it has no network or no scheduler to train.
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
        original = getattr(pipe, "scheduler", None)
        if original is None:
            raise UnsupportedPipeline(f"{type(pipe).__name__} has no scheduler whose steps could be trained.")
        self.component = policy_component(pipe, component)
        self.scheduler = stochastic_scheduler(original, sde_type)
        self.forward_context = forward_context
        self.is_mixed_precision = is_mixed_precision
        self.prompts = PromptCache()
        self.undecorated = inspect.unwrap(type(pipe).__call__)  # the original under torch.no_grad
        self._blank_outputs: dict[Any, Any] = {}

    @property
    def networks(self) -> list[nn.Module]:
        """The trained networks, as the pipeline calls them; several where experts share the steps out."""
        return [getattr(self.pipe, name) for name in self.component.split(", ")]

    @property
    def network(self) -> nn.Module:
        """The trained network, the first where there are several."""
        return self.networks[0]

    @contextlib.contextmanager
    def acting(self, driver: "_Recorder | _Teacher", forwards: Sequence[Callable] | None = None) -> Iterator[None]:
        """The pipeline with stochastic scheduler, gated networks and cached prompts; restored on leaving.

        Args:
            driver: what each scheduler step does, and whether the network must really run for it.
            forwards: in place of the networks' own forwards, e.g. a reference model's.
        """
        pipe, original = self.pipe, self.pipe.scheduler
        inner = {k: v for k, v in pipe.__dict__.items() if isinstance(v, DiffusionPipeline)}  # combined pipelines
        holders = [holder for holder in (pipe, *inner.values()) if getattr(holder, "scheduler", None) is original]
        self.scheduler.driver = driver
        with contextlib.ExitStack() as stack:
            own = [network.forward for network in self.networks]
            for network, real in zip(self.networks, forwards or own, strict=True):
                stack.enter_context(_replaced(network, "forward", self._gate(driver, network, real)))
            stack.enter_context(self.prompts.serving(pipe))
            stack.enter_context(_seeded(driver.initial_seeds, pipe))
            # __dict__, not setattr: a pipeline's own __setattr__ would write our class into its config
            for holder in holders:
                stack.enter_context(_replaced(holder, "scheduler", self.scheduler))
            for holder in (pipe, *inner.values()):
                stack.enter_context(_replaced(holder, "_progress_bar_config", {"disable": True}))
            for name, part in inner.items():
                stack.enter_context(_replaced(pipe, name, _Undecorated(part)))
            try:
                yield
            finally:
                self.scheduler.driver = None

    def _gate(self, driver: "_Recorder | _Teacher", network: nn.Module, real: Callable) -> Callable:
        """The network's forward, which does not run where its result is known already."""

        def gate(*args, **kwargs):
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [x for x in leaves if torch.is_tensor(x)]
            key = (
                id(network),
                tuple((x.shape, x.dtype) for x in tensors),
                tuple(x for x in leaves if isinstance(x, (str, bool))),
            )
            if not driver.needs_network and key in self._blank_outputs:
                return self._blank_outputs[key]
            with self.forward_context():
                output = real(*args, **kwargs)
            if self.is_mixed_precision:
                # autocast leaves half precision behind; the pipeline gets back the dtype of the latents it gave
                dtype = next(x.dtype for x in tensors if x.is_floating_point())
                output = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, output)
            if all(_is_blankable(leaf) for leaf in pytree.tree_leaves(output)):
                self._blank_outputs[key] = _blank(output)
            return output

        return gate


class _Undecorated:
    """A pipeline inside a pipeline, called without its `torch.no_grad` where gradients are wanted."""

    def __init__(self, pipe: DiffusionPipeline):
        self.__dict__["_pipe"] = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pipe, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return inspect.unwrap(type(self._pipe).__call__)(self._pipe, *args, **kwargs)


def _is_blankable(leaf: Any) -> bool:
    """Whether an output can be remembered as its shape: objects such as key-value caches carry state onwards."""
    return leaf is None or isinstance(leaf, (Tensor, int, float, str))


def _blank(output: Any) -> Any:
    """The shape of a network's output without its memory, for steps whose result is known already."""
    return pytree.tree_map_only(
        Tensor, lambda x: torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape), output
    )


def policy_component(pipe: DiffusionPipeline, component: str | None = None) -> str:
    """Name of the network that is trained: `component`, or the first usual one the pipeline has.

    Several are joined by ", ": the experts of a pipeline that switches between them, such as Wan 2.2's.
    """
    is_network = {name: isinstance(getattr(pipe, name, None), nn.Module) for name in pipe.components}
    if component is None:
        names = [name for name in POLICY_COMPONENTS if is_network.get(name) or is_network.get(f"{name}_2")]
        names = [name for name in (*names[:1], *(f"{name}_2" for name in names[:1])) if is_network.get(name)]
    else:
        names = [name for name in component.split(", ") if is_network.get(name)]
    if names and (component is None or component == ", ".join(names)):
        return ", ".join(names)
    raise UnsupportedPipeline(
        f"{type(pipe).__name__} has no network {component or ' or '.join(POLICY_COMPONENTS)!r}; set train_component "
        f"to one of its modules: {', '.join(name for name, found in is_network.items() if found)}."
    )


@contextlib.contextmanager
def _seeded(seeds: Tensor, pipe: DiffusionPipeline) -> Iterator[None]:
    """What a pipeline draws from torch's global generator is the same in rollout and replay, and leaves no trace."""
    device = pipe.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(seeds[0]))
        yield


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


class _Parts:
    """The latents that one step of the loop moves: one, or one for each scheduler (video and audio)."""

    def __init__(self):
        self.handed: list[Tensor] = []
        self.next: list[Tensor] = []
        self.scores: list[Tensor] = []

    def add(self, handed: Tensor, next_latents: Tensor, score: Tensor) -> None:
        """A latent's part of the step: what it was handed, what it left, and that one's log-density."""
        self.handed.append(handed)
        self.next.append(next_latents)
        self.scores.append(score)

    def log_prob(self) -> Tensor:
        """(batch,) log-density of all parts, averaged over all their dimensions."""
        if len(self.scores) == 1:
            return self.scores[0]
        sizes = [part[0].numel() for part in self.next]
        return sum(size * score for size, score in zip(sizes, self.scores, strict=True)) / sum(sizes)


def _distribution(means: list[Tensor], stds: list[Tensor], log_prob: Tensor) -> "StepDistribution":
    """Mean, std and log-probability of a step; flattened where it moves several latents."""
    mean, std = means[0], stds[0]
    if len(means) > 1:
        std = _joined([std.expand(mean.shape) for mean, std in zip(means, stds, strict=True)])
        mean = _joined(means)
    if not (std > 0).all():  # what is held fixed: mean and reference mean are equal there
        std = torch.where(std > 0, std, 1.0)
    return StepDistribution(mean, std, log_prob)


def _own_rows(values: Sequence[Tensor], sample: Tensor, count: int) -> list[Tensor]:
    """The first copy of each sample, of values that have a row for each."""
    return [value[:count] if value.ndim and len(value) == len(sample) else value for value in values]


def _joined(parts: list[Tensor]) -> Tensor:
    """One tensor a sample out of several, (batch, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)


class _Driver:
    """What recorder and teacher share: where the loop stands, and which scheduler has taken which step."""

    def __init__(self, initial_seeds: Tensor, count: int, noise_level: float):
        self.initial_seeds, self.count, self.noise_level = initial_seeds, count, noise_level
        self.current = 0
        self.taken: set[tuple[int, int]] = set()

    def enter(self, scheduler: StochasticScheduler, index: int) -> None:
        """Notes that a scheduler takes step `index`."""
        if (id(scheduler), index) in self.taken:
            raise UnsupportedPipeline(
                "the pipeline runs its denoising loop several times in one call (chunks or stages that build on each "
                "other), and such steps cannot be replayed one by one."
            )
        self.taken.add((id(scheduler), index))
        self.current = index + 1

    def rows(self, sample: Tensor) -> int:
        """How often each sample is in the batch: twice where a pipeline keeps both halves of guidance."""
        if len(sample) % self.count:
            raise UnsupportedPipeline(
                f"The pipeline steps {len(sample)} latents at once where {self.count} samples were asked for; roll "
                "out one sample at a time (rollout_batch_size=1)."
            )
        return len(sample) // self.count


class _Recorder(_Driver):
    """Drives a rollout: noise where it is asked for, records where it is trained."""

    needs_network = True

    def __init__(
        self,
        seeds: Tensor,
        initial_seeds: Tensor,
        noise_steps: set[int] | None,
        trained_steps: Tensor | None,
        noise_level: float,
        device: str | torch.device,
        is_complete: bool = True,
    ):
        super().__init__(initial_seeds, len(seeds), noise_level)
        self.generators = _generators(seeds)
        self.noise_steps, self.trained_steps = noise_steps, trained_steps
        self.device, self.is_complete = device, is_complete
        self.records: dict[int, _Parts] = {}
        self.left: dict[int, Tensor] = {}  # what each scheduler handed back last
        self.loop_length: int | None = None

    def _begin(self, scheduler: StochasticScheduler) -> None:
        """Takes the default steps, all but the last, from the loop: image-to-image starts in the middle."""
        self.loop_length = scheduler.loop_length
        if self.trained_steps is None:
            self.trained_steps = torch.arange(self.loop_length - 1).expand(self.count, -1)
        if self.noise_steps is None:
            self.noise_steps = set(range(self.loop_length - 1))
        trained = self.trained_steps.flatten().tolist()
        if trained and max(trained) >= self.loop_length - 1:
            raise UnsupportedPipeline(
                f"The pipeline takes {self.loop_length} steps, and the last has no noise: trained steps must be below "
                f"{self.loop_length - 1}, got {sorted(set(trained))}; it makes fewer steps than num_inference_steps "
                "says (strength below 1), so raise num_inference_steps or set sde_window."
            )

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.loop_length is None:
            self._begin(scheduler)
        if not self.is_complete and self.records and index > max(self.trained_steps.flatten().tolist()):
            raise _StepScored
        self.enter(scheduler, index)
        if index not in self.noise_steps:
            latents = scheduler.deterministic(prediction, timestep, sample)
        else:
            latents = self._sampled(scheduler, index, prediction, timestep, sample)
        self.left[id(scheduler)] = latents.clone()  # pipelines write conditions into what they are handed
        return latents

    def _sampled(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        copies = self.rows(sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        noise = torch.stack([torch.randn(sample.shape[1:], generator=generator) for generator in self.generators])
        noise = torch.cat([noise] * copies) if copies > 1 else noise
        latents = (mean + std * noise.to(mean.device)).to(sample.dtype)
        if index in self.trained_steps:
            handed = self.left.get(id(scheduler), sample)[: self.count].float()
            # scored as rounded: what replay is given back must be what was scored
            next_latents, mean, std = _own_rows((latents.float(), mean, std), sample, self.count)
            score = log_density(next_latents, mean, std)
            kept = (x.clone().to(self.device) for x in (handed, next_latents, score))
            self.records.setdefault(index, _Parts()).add(*kept)
        return latents

    def trajectory(self, **settings) -> Trajectory:
        """The recorded steps.

        Raises:
            UnsupportedPipeline: the loop ended before all trained steps were taken.
        """
        trained = [] if self.trained_steps is None else self.trained_steps.unique().tolist()
        missing = [step for step in trained if step not in self.records]
        if missing or not trained:
            raise UnsupportedPipeline(
                f"The pipeline took no step {missing or ''} through its scheduler; nothing can be recorded."
            )
        steps = {
            step: (_joined(parts.handed), _joined(parts.next), parts.log_prob())
            for step, parts in self.records.items()
        }
        latents, next_latents, log_probs = (
            torch.stack(
                [
                    torch.stack([steps[step][i][row] for step in columns.tolist()])
                    for row, columns in enumerate(self.trained_steps)
                ]
            )
            for i in range(3)
        )
        return Trajectory(latents, next_latents, log_probs, steps=self.trained_steps.clone(), **settings)


class _StepScored(Exception):
    """Leaves the pipeline: the replayed step is scored, the steps after it and the decoder are not needed."""


class _Teacher(_Driver):
    """Drives a replay: hands back what was recorded up to the replayed step, and scores that one."""

    def __init__(self, index: int, latents: Tensor, next_latents: Tensor, noise_level: float, initial_seeds: Tensor):
        super().__init__(initial_seeds, len(latents), noise_level)
        self.index = index
        self.latents, self.next_latents = latents, next_latents
        self.offsets = {"latents": 0, "next_latents": 0}
        self.parts, self.means, self.stds = _Parts(), [], []
        self.scored: StepDistribution | None = None

    @property
    def needs_network(self) -> bool:
        return self.current == self.index

    def _part(self, name: str, sample: Tensor) -> Tensor:
        """The next recorded latent of this step, in the shape of the pipeline's."""
        recorded, size, start = getattr(self, name), sample[0].numel(), self.offsets[name]
        self.offsets[name] = start + size
        return recorded.flatten(1)[:, start : start + size].reshape(self.count, *sample.shape[1:])

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        copies = self.rows(sample)
        if index < self.index:
            if index < self.index - 1:
                return sample
            return torch.cat([self._part("latents", sample)] * copies).to(sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        next_latents = self._part("next_latents", sample).to(device=mean.device, dtype=torch.float32)
        mean, std = _own_rows((mean, std), sample, self.count)
        self.parts.add(sample, next_latents, log_density(next_latents, mean, std))
        self.means.append(mean)
        self.stds.append(std)
        if self.offsets["next_latents"] >= self.next_latents[0].numel():
            self.scored = _distribution(self.means, self.stds, self.parts.log_prob())
            raise _StepScored
        return sample  # another scheduler steps the other part


def _generators(seeds: Tensor) -> list[torch.Generator]:
    """One a sample, on the CPU: what a sample gets depends on its seed alone, not on batch, process or device."""
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


def _arguments(policy: Policy, inputs: dict[str, Any], num_inference_steps: int, initial_seeds: Tensor) -> dict:
    """Keyword arguments of the pipeline's call; the same in rollout and replay."""
    generators = _generators(initial_seeds)
    parameters = inspect.signature(policy.undecorated).parameters
    arguments = {**inputs, "num_inference_steps": num_inference_steps}
    if "generator" in parameters:  # not every pipeline takes a list
        arguments["generator"] = generators if len(generators) > 1 else generators[0]
    is_picture = {"height", "num_frames"} & set(parameters)  # sound and depth maps are left in their own form
    if "output_type" in parameters and (is_picture or parameters["output_type"].default == "pil"):
        arguments.setdefault("output_type", "pil")
    return arguments


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
    is_complete: bool = True,
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
        is_complete: False ends the call when the last trained step is recorded; there are no samples then.

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
    rows = None
    if steps is not None:
        rows = torch.tensor([list(row) for row in steps], dtype=torch.int64).reshape(len(steps), -1)
    if noise_level <= 0 or (rows is not None and not rows.numel()):
        noise_steps, rows = noise_steps if noise_level > 0 else (), torch.empty(len(seeds), 0, dtype=torch.int64)
    noises = None if noise_steps is None else set(noise_steps)
    recorder = _Recorder(seeds, initial_seeds, noises, rows, noise_level, device, is_complete)
    output = [None]
    with policy.acting(recorder), contextlib.suppress(_StepScored):
        output = policy.pipe(**_arguments(policy, inputs, num_inference_steps, initial_seeds))
    settings = dict(num_inference_steps=num_inference_steps, noise_level=noise_level)
    record = noise_level > 0 and (rows is None or rows.numel() > 0)
    return output[0], recorder.trajectory(seeds=seeds, initial_seeds=initial_seeds, **settings) if record else None


def replay(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    trajectory: Trajectory,
    step: int,
    forward: Callable | Sequence[Callable] | None = None,
) -> StepDistribution:
    """Scores one recorded step under the network as it is now. Gradients flow where torch's grad mode lets them.

    Args:
        policy: as in [`rollout`].
        inputs: the same keyword arguments for the same samples.
        trajectory: of these samples, each with `step` among its trained steps.
        step: index of the step in the loop.
        forward: in place of the network's own forward, e.g. a reference model's; one a network.
    """
    forwards = [forward] if callable(forward) else forward
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    rows, columns = (trajectory.steps == step).nonzero(as_tuple=True)
    if len(rows) != len(trajectory):
        raise ValueError(f"step {step} was recorded for {len(rows)} of {len(trajectory)} samples; select those first.")
    teacher = _Teacher(
        step,
        trajectory.latents[rows, columns],
        trajectory.next_latents[rows, columns],
        trajectory.noise_level,
        trajectory.initial_seeds,
    )
    with policy.acting(teacher, forwards), contextlib.suppress(_StepScored):
        policy.undecorated(
            policy.pipe, **_arguments(policy, inputs, trajectory.num_inference_steps, trajectory.initial_seeds)
        )
    if teacher.scored is None:
        raise RuntimeError(f"{type(policy.pipe).__name__} ended before step {step}; it was not replayed.")
    return teacher.scored
