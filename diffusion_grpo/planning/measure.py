"""Measure one micro-batch of a run on a pipeline without weights: what is recorded, and the peak memory of each phase.

The rollout and the update are those of training, so nothing is estimated per family. In the denoising loop, the
network runs in the first step only; later steps reuse its result.

torch's `MemTracker` is not used: it keeps statistics per module, and refuses a module that is called several times.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import CleanSamples
from ..policy.unguided import switch_guidance_off
from ..training.decoding import find_decoders
from ..training.memory import list_weights

ENCODING, DENOISING, DECODING, UPDATE = "encoding", "denoising", "decoding", "update"  # phases of a run
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors, fake or real, that are made inside this context, and their peaks."""

    def __init__(self, known: Iterable[Tensor] = (), phase: str = ""):
        super().__init__()
        self.now, self.phase = 0, phase
        self.peaks: Counter[str] = Counter()
        # storages of tensors without values have no address; those that are known are kept alive, with their keys
        self._known = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in known)}
        self._alive: set[int] = set()

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if torch.is_tensor(tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._known:
            return
        self._alive.add(key)
        self.now += size
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


@dataclass(frozen=True)
class CallSizes:
    """Numbers of rows in the calls of a run."""

    rollout: int
    micro_batch: int
    update: int

    @classmethod
    def of(cls, args: DiffusionGRPOConfig) -> "CallSizes":
        micro_batch, sharing = args.per_device_train_batch_size, args.trained_sharing
        update = micro_batch
        # each sample trains only one step, the one with the last shared network call
        if args.shares_calls and args.trained_share == args.trained_count == 1:
            is_cut = update % sharing and sharing % update  # a micro-batch may then have samples of one more latent
            update = min(update, math.ceil(update / sharing) + bool(is_cut))
        return cls(args.rollout_call_size, micro_batch, update)


@dataclass
class Measurement:
    """Sizes of one call and one micro-batch, measured on a pipeline without weights."""

    peaks: dict[str, int]  # bytes by phase
    sample_bytes: int  # of what is recorded
    step_bytes: int = 0  # per sample, in addition
    prompt_bytes: int = 0
    evaluations: float = 1.0  # per sample and step
    update_evaluations: float = 1.0
    tokens: int = 0
    is_batched: bool = True
    shares_prediction: bool = False


def measure(
    policy: Policy,
    mode: FakeTensorMode,
    make_inputs: Callable[[int], dict[str, Any]],
    sizes: CallSizes,
    args: DiffusionGRPOConfig,
) -> Measurement:
    """Roll out one call, and update on the first step of one micro-batch."""
    with CountedMasks(), _draw_without_weights(policy, mode):
        if policy.draws_tokens:
            return _measure_tokens(policy, mode, make_inputs(sizes.micro_batch), sizes.micro_batch, args)
        samples, count, watch = sizes.rollout, args.num_inference_steps, PhaseWatch(policy)
        settings = {"seeds": range(samples), "steps": [[0]] * samples, "num_inference_steps": count}
        inputs = make_inputs(samples)
        with watch.watching():
            try:
                _, trajectory = rollout(policy, inputs, **settings)
            except Exception:  # not every pipeline decodes tensors without values
                watch.reset()
                _, trajectory = rollout(policy, inputs, **settings, is_complete=False)
        step_bytes, sample_bytes = count_trajectory_bytes(trajectory)
        shares_prediction = False
        if args.shares_calls:
            prefix = run_prefix(policy, make_inputs(1), 0, num_inference_steps=count, initial_seeds=[0])
            shares_prediction = prefix.prediction is not None
        rows = sizes.update if shares_prediction else sizes.micro_batch
        if rows != samples or args.is_renoised:
            inputs = make_inputs(rows)
            if args.is_renoised:
                inputs = switch_guidance_off(policy.pipe, policy.networks, inputs)
            settings |= {"seeds": range(rows), "steps": [[0]] * rows}
            _, trajectory = rollout(policy, inputs, **settings, is_complete=False)  # which encodes the prompts, too
        evaluations = sum(watch.rows) / samples
        return Measurement(
            peaks={**watch.live.peaks, UPDATE: measure_update(policy, mode, inputs, trajectory, args)},
            sample_bytes=sample_bytes
            + shares_prediction * trajectory.steps.element_size(),  # `Trajectory.shared_steps`
            step_bytes=step_bytes,
            prompt_bytes=watch.encoded // samples,
            evaluations=evaluations,
            update_evaluations=1.0 if args.is_renoised else evaluations,
            shares_prediction=shares_prediction,
        )


class PhaseWatch:
    """Tells the phases of a rollout apart, and skips the network after the first step."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.live = LiveBytes(list_pipeline_weights(policy.pipe), ENCODING)
        self.reset()

    def reset(self) -> None:
        """Forget the counts and encoded prompts, for another attempt."""
        self._policy.prompts = PromptCache()
        self.live.peaks.clear()
        self.live.begin(ENCODING)
        self.encoded = 0
        self.rows: list[int] = []
        self._results: dict[int, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the pipeline's networks and decoders; restore them on leaving."""
        with contextlib.ExitStack() as stack:
            for network in self._policy.networks:
                stack.enter_context(replace_attribute(network, "forward", self._wrap_network(network)))
            for part in find_decoders(self._policy.pipe):
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


def list_pipeline_weights(pipe: DiffusionPipeline) -> list[Tensor]:
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    return [tensor for part in parts for tensor in list_weights(part)]


def measure_update(
    policy: Policy,
    mode: FakeTensorMode,
    inputs: dict[str, Any],
    trajectory: Trajectory | TokenTrajectory,
    args: DiffusionGRPOConfig,
) -> int:
    """Return the peak bytes of one forward and backward pass, without weights, gradients and trajectory."""
    trained = [p for network in policy.networks for p in network.parameters() if p.requires_grad]
    for parameter in trained:
        with mode:
            parameter.grad = torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in trained]
    live = LiveBytes([*list_pipeline_weights(policy.pipe), *gradients, *trajectory.tensors().values()], UPDATE)
    try:
        with torch.enable_grad(), live:
            if args.takes_gradients:
                _decode_with_gradient(policy, inputs, trajectory, args.trainable_steps.start).mean().backward()
            else:
                replay(policy, inputs, trajectory, 0).log_prob.mean().backward()
    finally:
        for parameter in trained:
            parameter.grad = None
    return live.peaks[UPDATE]


def _decode_with_gradient(policy: Policy, inputs: dict[str, Any], trajectory: Trajectory, step: int) -> Tensor:
    """Return what the decoder makes of the most steps that have a gradient; rewards would keep more."""
    entered, steps, tensors = trajectory.latents[:, 0], torch.full_like(trajectory.steps, step), []
    seeds, count = (trajectory.seeds, trajectory.initial_seeds), trajectory.num_inference_steps
    samples = CleanSamples(entered, steps, *seeds, count, tokens=trajectory.tokens, entered=entered)

    def watched(decode: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors.extend(leaf for leaf in pytree.tree_leaves(decode(*args, **kwargs)) if torch.is_tensor(leaf))
            raise StepScored  # later code needs the values of pixels

        return run

    with contextlib.ExitStack() as stack:
        for part in find_decoders(policy.pipe):
            stack.enter_context(replace_attribute(part, "decode", watched(part.decode)))
        stack.enter_context(contextlib.suppress(StepScored))
        tensors.append(policy.finish(inputs, samples).pixels)  # without a decoder
    return tensors[0]


def _measure_tokens(
    policy: Policy, mode: FakeTensorMode, inputs: dict[str, Any], samples: int, args: DiffusionGRPOConfig
) -> Measurement:
    """Roll out one micro-batch of a policy that draws tokens, then score them with gradient, in one pass."""
    record, recorded = policy.record, []

    def stop(*arguments: Any) -> None:
        recorded.append(record(*arguments))
        raise StepScored

    with replace_attribute(policy, "record", stop), contextlib.suppress(StepScored):
        rollout(policy, inputs, seeds=range(samples), num_inference_steps=args.num_inference_steps)
    trajectory = recorded[0]
    size = sum(tensor.nbytes for tensor in trajectory.tensors().values())
    peaks = {UPDATE: measure_update(policy, mode, inputs, trajectory, args)}
    return Measurement(peaks, size // samples, tokens=trajectory.ids.shape[1])


class CountedMasks(TorchDispatchMode):
    """Determines how many elements of a fake tensor a mask selects, all if it is fake too; torch refuses to do so."""

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
def _draw_without_weights(policy: Policy, mode: FakeTensorMode) -> Iterator[None]:
    """Let a language model in the pipeline draw zeros: without weights it cannot draw any token."""

    def draw(call: dict[str, Any], seeds: Tensor) -> Drawn:
        shape = len(seeds), policy.family.token_count(call)
        with mode:
            allowed = torch.ones(*shape, policy.family.vocabulary(policy.pipe), dtype=torch.bool)
        return Drawn(
            ids=torch.zeros(shape, dtype=torch.int64),
            mask=torch.ones(shape, dtype=torch.bool),
            kept=allowed if policy.sampling.is_truncated else None,
            log_probs=torch.zeros(shape),
        )

    with replace_attribute(policy, "draw_tokens", draw):
        yield


def count_trajectory_bytes(trajectory: Trajectory) -> tuple[int, int]:
    """Count the bytes per step and sample, and the bytes per sample outside its steps."""
    tensors = trajectory.tensors()
    by_step = [tensors.pop(name) for name in ("latents", "next_latents", "log_probs", "steps")]
    per_step = sum(tensor.nbytes for tensor in by_step) // trajectory.steps.numel()
    return per_step, sum(tensor.nbytes for tensor in tensors.values()) // len(trajectory)
