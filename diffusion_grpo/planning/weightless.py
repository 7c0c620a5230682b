"""Pipelines without weights, built from configuration files, and measurements of their rollouts.

The pipeline is of diffusers' own class. Its networks hold fake tensors (torch's `FakeTensorMode`), which have a shape
and a dtype but no memory. It is loaded by the rules of training and rolled out by the same code, so nothing is
estimated per family.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config.settings import DiffusionGRPOConfig
from ..policy.drivers import StepScored
from ..policy.language_model import Drawn
from ..policy.network_gate import replace_attribute
from ..policy.rollout import Policy, Trajectory, replay, rollout
from ..policy.token_process import TokenTrajectory, pack_bits
from ..training.model import checkpoint_share, choose_dtype, set_scheduler

INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
WEIGHTS = ["*.safetensors", "*.bin", "*.msgpack", "*.h5", "*.ckpt", "*.pt", "*.onnx*", "*.gguf"]


def find_configuration(model: str) -> Path:
    """Find the folder with the configuration files of a pipeline, downloading them from the Hub if needed.

    Raises:
        OSError: `model` is not a folder, and the Hub cannot be reached or has no such pipeline.
    """
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, ignore_patterns=[*WEIGHTS, "*.png", "*.jpg", "*.gif", "*.mp4"]))


def build_weightless_pipeline(
    folder: Path, args: DiffusionGRPOConfig, is_full_training: bool
) -> tuple[DiffusionPipeline, FakeTensorMode]:
    """Build the pipeline of a folder as `load_pipeline` does, but with fake tensors instead of weights.

    Raises:
        ValueError: neither diffusers nor transformers has the class of one of its parts.
    """
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = choose_dtype(args, is_full_training)
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, list) or entry[0] is None or entry[1] is None:
            parts[name] = None if isinstance(entry, list) else entry
            continue
        own = dtype.get(name, dtype.get("default", torch.float32)) if isinstance(dtype, dict) else dtype
        parts[name] = _build_part(folder / name, entry, own, mode)
    pipe = getattr(diffusers, index["_class_name"])(**parts)
    return set_scheduler(pipe, args.scheduler_kwargs), mode


def _build_part(folder: Path, entry: list[str], dtype: torch.dtype | None, mode: FakeTensorMode) -> Any:
    library, name = entry
    cls = getattr(diffusers, name, None) or getattr(transformers, name, None)
    if cls is None:
        raise ValueError(f"{folder.name} is a {name} of {library}, which diffusers and transformers do not have.")
    if not issubclass(cls, nn.Module):
        return cls.from_pretrained(folder)
    if issubclass(cls, transformers.PreTrainedModel):
        config = cls.config_class.from_pretrained(folder)
        with mode:
            part = cls(config)
        own = dtype or getattr(config, "dtype", None)  # as transformers does by default
        kept = set(part._keep_in_fp32_modules_strict or ())
        kept |= set(part._keep_in_fp32_modules or ()) if own == torch.float16 else set()
    else:
        with mode:
            part = cls.from_config(cls.load_config(folder))
        own, kept = dtype, set(part._keep_in_fp32_modules or ())
    return _cast(part, own or torch.float32, kept).eval()


def _cast(part: nn.Module, dtype: torch.dtype, kept: set[str]) -> nn.Module:
    """Cast the part, except for what its class keeps in float32, and move it to the meta device."""

    def cast(name: str, tensor: Tensor) -> Tensor:
        is_kept = kept & set(name.split(".")) and dtype != torch.float32
        to = tensor.dtype if not tensor.is_floating_point() else torch.float32 if is_kept else dtype
        return torch.empty(tensor.shape, dtype=to, device="meta")

    _replace(part, cast)
    return part


def move_to_cpu(pipe: DiffusionPipeline, mode: FakeTensorMode) -> None:
    """Replace the weights of a prepared pipeline by fake tensors on the CPU, so that it can be called."""

    def fake(name: str, tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            _replace(part, fake)


def _replace(part: nn.Module, new: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each weight and buffer. Tied tensors stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, module in part.named_modules():
        own = {"recurse": False, "remove_duplicate": False}
        for name, tensor in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if id(tensor) not in made:
                other = new(f"{prefix}.{name}", tensor)
                if isinstance(tensor, nn.Parameter):
                    other = nn.Parameter(other, requires_grad=tensor.requires_grad)
                made[id(tensor)] = tensor, other
            setattr(module, name, made[id(tensor)][1])


@dataclass
class Measurement:
    """Sizes of one micro-batch of a rollout, measured on a pipeline without weights.

    Attributes:
        samples: number of samples in the micro-batch.
        step_bytes: bytes per recorded step and sample: latents before and after the step, log-probability, step index.
        sample_bytes: bytes per sample that do not depend on the number of trained steps, such as seeds and tokens.
        evaluations: forward passes of the trained network per step and sample; 2 with guidance in most pipelines.
        activations: bytes that autograd keeps for the backward pass of one step of the micro-batch.
        recomputed: the part of `activations` in the largest block that gradient checkpointing recomputes.
        update_evaluations: forward passes per trained step and sample in an update.
        tokens: tokens that a language model draws per sample; 0 where none is trained.
    """

    samples: int
    step_bytes: int
    sample_bytes: int
    evaluations: float
    activations: int
    recomputed: int
    update_evaluations: float
    tokens: int = 0


def measure(
    policy: Policy, mode: FakeTensorMode, inputs: dict[str, Any], samples: int, args: DiffusionGRPOConfig
) -> Measurement:
    """Roll out the first step of one micro-batch, then repeat its network calls with gradient.

    Args:
        policy: policy of a pipeline from `build_weightless_pipeline` that is prepared for training.
        mode: the fake tensor mode of that pipeline.
        inputs: keyword arguments of the pipeline's call for the micro-batch.
        samples: number of samples in the micro-batch.
        args: settings of the run.
    """
    if policy.draws_tokens:
        return measure_tokens(policy, mode, inputs, samples, args)
    calls: list[tuple[nn.Module, tuple, dict]] = []
    with _record_calls(policy, calls), _draw_without_weights(policy, mode):
        _, trajectory = rollout(
            policy,
            inputs,
            seeds=range(samples),
            num_inference_steps=args.num_inference_steps,
            steps=[[0]] * samples,
            is_complete=False,
        )
    rows = [next(x for x in pytree.tree_leaves(call[1:]) if torch.is_tensor(x) and x.ndim > 1) for call in calls]
    activations, recomputed = count_kept_bytes(policy, lambda: _repeat_calls(policy, calls), args)
    per_step, per_sample = count_trajectory_bytes(trajectory)
    evaluations = sum(map(len, rows)) / samples
    return Measurement(samples, per_step, per_sample, evaluations, activations, recomputed, evaluations)


def measure_tokens(
    policy: Policy, mode: FakeTensorMode, inputs: dict[str, Any], samples: int, args: DiffusionGRPOConfig
) -> Measurement:
    """Roll out one micro-batch of a policy that draws tokens, then score them with gradient.

    The tokens are zeros: a model without weights can draw none. One teacher-forced pass scores them all, so that the
    replay keeps the activations of the network and of the log-probabilities, one number per id.

    Args:
        See [`measure`].
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
    activations, recomputed = count_kept_bytes(policy, lambda: replay(policy, inputs, trajectory, 0), args)
    per_sample = sum(map(_count_bytes, trajectory.tensors().values())) // samples
    return Measurement(samples, 0, per_sample, 1.0, activations, recomputed, 1.0, tokens=ids.shape[1])


class CountedMasks(TorchDispatchMode):
    """Count what a mask selects of a fake tensor, which torch refuses to do.

    A mask with values, as that of a tokenizer, selects what it selects; one without is taken to select everything.
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
    """Let a language model in the pipeline's call draw zeros; with `drawn`, keep them there and end the call."""

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

    with replace_attribute(policy, "draw_tokens", draw):
        yield


def measure_renoised(guided: Measurement, unguided: Measurement, has_old_policy: bool) -> Measurement:
    """Turn measurements of recorded steps into those of finished samples that are noised again.

    Args:
        guided: of the rollout's calls.
        unguided: of the same calls without guidance, as updates make them.
        has_old_policy: whether an old policy's predictions are kept, one latent per step.
    """
    indices = 12  # bytes per recorded step of its log-probability and index, beside the latents before and after it
    latent = (guided.step_bytes - indices) // 2
    return dataclasses.replace(
        guided,
        step_bytes=8 + (latent if has_old_policy else 0),
        sample_bytes=guided.sample_bytes + latent,
        activations=unguided.activations,
        recomputed=unguided.recomputed,
        update_evaluations=unguided.evaluations,
    )


def count_trajectory_bytes(trajectory: Trajectory) -> tuple[int, int]:
    """Count the bytes per step and sample, and the bytes per sample outside its steps."""
    tensors = trajectory.tensors()
    by_step = [tensors.pop(name) for name in ("latents", "next_latents", "log_probs", "steps")]
    per_step = sum(_count_bytes(tensor) for tensor in by_step) // trajectory.steps.numel()
    return per_step, sum(_count_bytes(tensor) for tensor in tensors.values()) // len(trajectory)


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def _record_calls(policy: Policy, calls: list) -> Iterator[None]:
    """Append the calls of the trained networks in the first step of a rollout to `calls`."""
    real = [network.forward for network in policy.networks]

    def wrap(network: nn.Module, forward: Callable) -> Callable:
        def record_and_call(*args: Any, **kwargs: Any) -> Any:
            if policy.scheduler.driver.current == 0:
                calls.append((network, args, kwargs))
            return forward(*args, **kwargs)

        return functools.wraps(forward)(record_and_call)

    for network, forward in zip(policy.networks, real, strict=True):
        network.forward = wrap(network, forward)
    try:
        yield
    finally:
        for network in policy.networks:
            del network.forward


def _repeat_calls(policy: Policy, calls: list[tuple[nn.Module, tuple, dict]]) -> None:
    for network, positional, named in calls:
        with policy.access.forward_context():
            network(*positional, **named)


def count_kept_bytes(policy: Policy, run: Callable[[], Any], args: DiffusionGRPOConfig) -> tuple[int, int]:
    """Count the bytes besides the weights that autograd keeps, in all and in the largest recomputed block.

    A checkpointed block keeps only its inputs. During its recomputation it keeps everything.

    Args:
        policy: its networks are those that are trained.
        run: what is done with gradient.
        args: settings of the run.
    """
    weights = {identify_storage(x) for network in policy.networks for x in [*network.parameters(), *network.buffers()]}
    outside, largest = KeptStorages(weights), 0

    def run_block(block: Callable, *inputs: Any) -> Any:
        nonlocal largest
        inside = KeptStorages(weights)
        for tensor in inputs:
            if torch.is_tensor(tensor):
                outside.add(tensor)
        with inside:
            output = block(*inputs)
        largest = max(largest, inside.bytes)
        return output

    if args.activation_checkpointing:
        for network in policy.networks:
            _checkpoint_by(network, run_block, args.selective_checkpointing)
    with torch.enable_grad(), outside:
        run()
    return outside.bytes + largest, largest


def _checkpoint_by(network: nn.Module, run_block: Callable, share: float) -> None:
    """Let a network call `run_block` where it would recompute a block."""
    layers = [layer for layer in network.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        network.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint_share(run_block, share))
    for layer in layers:  # a network of transformers: `prepare_model` has chosen the share
        layer._gradient_checkpointing_func = run_block


class KeptStorages(torch.autograd.graph.saved_tensors_hooks):
    """Counter of the bytes that autograd keeps. Each storage counts once; those in `known` do not count."""

    def __init__(self, known: set[int]):
        super().__init__(self._pack, lambda tensor: tensor)
        self.known, self.bytes = set(known), 0
        self.alive: list[Tensor] = []  # keeps addresses from being reused

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        if identify_storage(tensor) not in self.known:
            self.known.add(identify_storage(tensor))
            self.alive.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()


def identify_storage(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage, even without memory."""
    return tensor.untyped_storage()._cdata
