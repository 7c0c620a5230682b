"""Measure one micro-batch of a run on a pipeline without weights: what is recorded, and the peak memory of each phase.

The rollout and the update are those of training, so nothing is estimated per family. In the denoising loop, the
network runs in the first step only; later steps reuse its result.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..config.settings import DiffusionGRPOConfig
from ..policy.drivers import StepScored
from ..policy.language_model import Drawn
from ..policy.networks import replace_attribute
from ..policy.prompt_cache import PromptCache
from ..policy.rollout import Policy, Trajectory, replay, rollout, run_prefix
from ..policy.token_process import TokenTrajectory, pack_bits
from .live_bytes import LiveBytes
from .repeats import Run, count_repeats, shorten
from .weightless import forget_conversions

ENCODING, DENOISING, DECODING, UPDATE = "encoding", "denoising", "decoding", "update"  # phases of a run
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


@dataclass(frozen=True)
class CallSizes:
    """Numbers of rows in the calls of a run."""

    rollout: int
    micro_batch: int
    update: int

    @classmethod
    def of(cls, args: DiffusionGRPOConfig) -> "CallSizes":
        """Derive the sizes from the settings."""
        micro_batch, sharing = args.per_device_train_batch_size, args.trained_sharing
        update = micro_batch
        if args.shares_calls and args.trains_shared_step_alone:
            is_cut = update % sharing and sharing % update  # a micro-batch may then have samples of one more latent
            update = min(update, math.ceil(update / sharing) + bool(is_cut))
        return cls(args.rollout_call_size, micro_batch, update)


@dataclass
class Measurement:
    """Sizes of one call and one micro-batch, measured on a pipeline without weights."""

    samples: int
    step_bytes: int
    sample_bytes: int
    prompt_bytes: int
    evaluations: float
    update_evaluations: float
    peaks: dict[str, int]
    tokens: int = 0
    is_batched: bool = True
    shares_prediction: bool = False


def measure(
    policy: Policy,
    mode: FakeTensorMode,
    make_inputs: Callable[[int], dict[str, Any]],
    sizes: "CallSizes",
    args: DiffusionGRPOConfig,
) -> Measurement:
    """Roll out one call, and update on the first step of one micro-batch.

    If a network has many equal blocks, only a few of them run (`repeats.py`), unless checkpointing is reentrant or
    covers only some of the blocks.
    """
    if policy.draws_tokens:
        return measure_tokens(policy, mode, make_inputs(sizes.micro_batch), sizes.micro_batch, args)
    if args.selective_checkpointing == 1 and not (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        with shorten(policy.networks) as runs:
            try:
                return _measure_steps(policy, mode, make_inputs, sizes, args, runs)
            except Exception:  # the blocks differ after all, or other code needs all of them
                if not runs:
                    raise
    return _measure_steps(policy, mode, make_inputs, sizes, args, [])


def _measure_steps(
    policy: Policy,
    mode: FakeTensorMode,
    make_inputs: Callable[[int], dict[str, Any]],
    sizes: "CallSizes",
    args: DiffusionGRPOConfig,
    runs: list[Run],
) -> Measurement:
    samples, inputs = sizes.rollout, make_inputs(sizes.rollout)
    settings = {"seeds": range(samples), "num_inference_steps": args.num_inference_steps, "steps": [[0]] * samples}
    shares_prediction = args.shares_calls and _shares_prediction(policy, mode, make_inputs(1), args)
    watch = PhaseWatch(policy)
    watch.reset()
    with watch.watching(), count_repeats(runs, watch.live), _draw_without_weights(policy, mode):
        try:
            _, trajectory = rollout(policy, inputs, **settings)
        except Exception:  # not every pipeline decodes tensors without values
            watch.reset()
            forget_conversions(mode)
            _, trajectory = rollout(policy, inputs, **settings, is_complete=False)
    per_step, per_sample = count_trajectory_bytes(trajectory)
    rows = sizes.update if shares_prediction else sizes.micro_batch
    per_sample += shares_prediction * trajectory.steps.element_size()  # for `Trajectory.shared_steps`
    if rows != samples:
        inputs, settings["seeds"] = make_inputs(rows), range(rows)
        settings["steps"] = [[0]] * rows
        policy.prompts.clear()
        with _draw_without_weights(policy, mode):
            _, trajectory = rollout(policy, inputs, **settings, is_complete=False)
    update = measure_update(policy, mode, inputs, trajectory, runs)
    evaluations = sum(watch.rows) / samples
    peaks = {**watch.live.peaks, UPDATE: update}
    found = Measurement(samples, per_step, per_sample, watch.encoded // samples, evaluations, evaluations, peaks)
    return dataclasses.replace(found, shares_prediction=shares_prediction)


def _shares_prediction(
    policy: Policy, mode: FakeTensorMode, inputs: dict[str, Any], args: DiffusionGRPOConfig
) -> bool:
    """Make a prediction for an initial latent, and return whether its samples can share it."""
    with _draw_without_weights(policy, mode):
        prefix = run_prefix(policy, inputs, 0, num_inference_steps=args.num_inference_steps, initial_seeds=[0])
    return prefix.prediction is not None


class PhaseWatch:
    """Tells the phases of a rollout apart, and skips the network after the first step."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.live = LiveBytes(list_weights(policy.pipe), ENCODING)
        self.rows: list[int] = []
        self.encoded = 0
        self._results: dict[int, Any] = {}

    def reset(self) -> None:
        """Forget the counts and encoded prompts, for another attempt."""
        self._policy.prompts = PromptCache()
        self.live.peaks.clear()
        self.live.begin(ENCODING)
        self.rows.clear()
        self._results.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the pipeline's networks and decoders; restore them on leaving."""
        with contextlib.ExitStack() as stack:
            for network in self._policy.networks:
                stack.enter_context(replace_attribute(network, "forward", self._wrap_network(network)))
            for part in self._policy.pipe.components.values():
                if isinstance(part, nn.Module) and callable(getattr(part, "decode", None)):
                    stack.enter_context(replace_attribute(part, "decode", self._wrap_decoder(part)))
            stack.enter_context(self.live)
            yield

    def _wrap_network(self, network: nn.Module) -> Callable:
        forward = network.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            is_first = self._policy.scheduler.driver.current == 0
            if is_first:
                if self.live.phase == ENCODING:
                    self.encoded = self.live.now
                    self.live.begin(DENOISING)
                leaves = pytree.tree_leaves((args, kwargs))
                self.rows.append(len(next(x for x in leaves if torch.is_tensor(x) and x.ndim > 1)))
            if is_first or id(network) not in self._results:
                self._results[id(network)] = forward(*args, **kwargs)
            return self._results[id(network)]

        return run

    def _wrap_decoder(self, part: nn.Module) -> Callable:
        decode = part.decode

        @functools.wraps(decode)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.live.begin(DECODING)
            decode(*args, **kwargs)
            raise StepScored  # later code needs the values of pixels

        return run


def list_weights(pipe: DiffusionPipeline) -> list[Tensor]:
    """Return the weights and buffers of all parts."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    return [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]


def measure_update(
    policy: Policy,
    mode: FakeTensorMode,
    inputs: dict[str, Any],
    trajectory: Trajectory | TokenTrajectory,
    runs: list[Run] | None = None,
) -> int:
    """Return the peak bytes of one forward and backward pass, without weights, gradients and trajectory.

    Gradient checkpointing, if it is on, works as in training.
    """
    trained = [p for network in policy.networks for p in network.parameters() if p.requires_grad]
    for parameter in trained:
        with mode:
            parameter.grad = torch.empty_like(parameter)
    known = [*list_weights(policy.pipe), *(p.grad for p in trained), *trajectory.tensors().values()]
    live = LiveBytes(known, UPDATE)
    forget_conversions(mode)
    try:
        with torch.enable_grad(), live, count_repeats(runs or [], live):
            replay(policy, inputs, trajectory, 0).log_prob.mean().backward()
    finally:
        for parameter in trained:
            parameter.grad = None
    return live.peak


def measure_tokens(
    policy: Policy, mode: FakeTensorMode, inputs: dict[str, Any], samples: int, args: DiffusionGRPOConfig
) -> Measurement:
    """Roll out one micro-batch of a policy that draws tokens, then score them with gradient.

    The tokens are zeros, since a model without weights cannot draw any. One teacher-forced pass scores them all, so
    the replay keeps the activations of the network and of the log-probabilities, one number per id.
    """
    drawn: list[Drawn] = []
    with _draw_without_weights(policy, mode, drawn), contextlib.suppress(StepScored):
        rollout(policy, inputs, seeds=range(samples), num_inference_steps=args.num_inference_steps)
    ids, kept = drawn[0].ids, drawn[0].kept
    seeds = torch.arange(samples)
    trajectory = TokenTrajectory(
        ids=ids,
        mask=drawn[0].mask,
        support=ids.new_zeros((*ids.shape, 0), dtype=torch.uint8) if kept is None else pack_bits(kept),
        log_probs=drawn[0].log_probs[:, None],
        drift=drawn[0].log_probs,
        steps=torch.zeros(samples, 1, dtype=torch.int64),
        seeds=seeds,
        initial_seeds=seeds,
        num_inference_steps=args.num_inference_steps,
        temperature=float(policy.sampling.temperature),
    )
    update = measure_update(policy, mode, inputs, trajectory)
    per_sample = sum(map(_count_bytes, trajectory.tensors().values())) // samples
    return Measurement(samples, 0, per_sample, 0, 1.0, 1.0, {UPDATE: update}, tokens=ids.shape[1])


class CountedMasks(TorchDispatchMode):
    """Determines how many elements of a fake tensor a mask selects, which torch refuses to do.

    A mask with values, such as a tokenizer's, selects as usual; a mask without values is taken to select everything.
    """

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in INDEXED and isinstance(args[0], FakeTensor):
            places: list[Tensor | None] = []
            for index in args[1]:
                is_mask = index is not None and index.dtype == torch.bool
                places.extend(_find_places(index) if is_mask else [index])
            args = args[0], places, *args[2:]
        return func(*args, **(kwargs or {}))


def _find_places(mask: Tensor) -> tuple[Tensor, ...]:
    real = torch.ones(mask.shape, dtype=torch.bool) if isinstance(mask, FakeTensor) else mask
    return real.nonzero(as_tuple=True)


@contextlib.contextmanager
def _draw_without_weights(policy: Policy, mode: FakeTensorMode, drawn: list[Drawn] | None = None) -> Iterator[None]:
    """Prepare for a call of the pipeline in which a language model draws zeros.

    If `drawn` is given, append the drawn tokens to it and end the call.
    """

    def draw(call: dict[str, Any], seeds: Tensor) -> Drawn:
        shape = len(seeds), policy.family.token_count(call)
        with mode:
            kept = torch.ones(*shape, policy.family.vocabulary(policy.pipe), dtype=torch.bool)
        made = Drawn(
            ids=torch.zeros(shape, dtype=torch.int64),
            mask=torch.ones(shape, dtype=torch.bool),
            kept=kept if policy.sampling.is_truncated else None,
            log_probs=torch.zeros(shape),
        )
        if drawn is None:
            return made
        drawn.append(made)
        raise StepScored

    forget_conversions(mode)
    with replace_attribute(policy, "draw_tokens", draw):
        yield


def measure_renoised(guided: Measurement, unguided: Measurement, has_old_policy: bool) -> Measurement:
    """Turn measurements of recorded steps into those of finished samples that are noised again."""
    latent = _count_latent_bytes(guided)
    return dataclasses.replace(
        guided,
        step_bytes=8 + (latent if has_old_policy else 0),
        sample_bytes=guided.sample_bytes + latent,
        peaks={**guided.peaks, UPDATE: unguided.peaks[UPDATE]},
        update_evaluations=unguided.evaluations,
    )


def add_means(counted: Measurement) -> Measurement:
    """Add the means of the recorded steps that a rollout keeps; each is as large as a latent."""
    return dataclasses.replace(counted, step_bytes=counted.step_bytes + _count_latent_bytes(counted))


def _count_latent_bytes(counted: Measurement) -> int:
    indices = 12  # bytes per step of log-probability and index, in addition to the latents before and after it
    return (counted.step_bytes - indices) // 2


def count_trajectory_bytes(trajectory: Trajectory) -> tuple[int, int]:
    """Count the bytes per step and sample, and the bytes per sample outside its steps."""
    tensors = trajectory.tensors()
    by_step = [tensors.pop(name) for name in ("latents", "next_latents", "log_probs", "steps")]
    per_step = sum(_count_bytes(tensor) for tensor in by_step) // trajectory.steps.numel()
    return per_step, sum(_count_bytes(tensor) for tensor in tensors.values()) // len(trajectory)


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
