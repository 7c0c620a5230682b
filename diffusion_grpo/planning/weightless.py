"""A pipeline without its weights: a folder's configuration files go in; sizes, latents and network calls leave.

A module of its own because it answers what can be known before 24 GB are loaded. The pipeline is diffusers' own class
around networks of fake tensors (torch's `FakeTensorMode`: every shape and dtype, no memory), and what is asked of it
is asked by the code that trains: the same loading rules, the same rollout. Nothing is estimated by family.
"""

import contextlib
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ..config.settings import DiffusionGRPOConfig
from ..policy.rollout import Policy, Trajectory, rollout
from ..training.model import checkpoint_share, choose_dtype, set_scheduler

WEIGHTS = ["*.safetensors", "*.bin", "*.msgpack", "*.h5", "*.ckpt", "*.pt", "*.onnx*", "*.gguf"]


def configuration_folder(model: str) -> Path:
    """Where the configuration files of a pipeline are: its folder, or the Hub's files without the weights.

    Raises:
        OSError: it is no folder, and the Hub is not reached or has no such pipeline.
    """
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, ignore_patterns=[*WEIGHTS, "*.png", "*.jpg", "*.gif", "*.mp4"]))


def weightless_pipeline(
    folder: Path, args: DiffusionGRPOConfig, is_full_training: bool
) -> tuple[DiffusionPipeline, FakeTensorMode]:
    """The pipeline of a folder as `load_pipeline` gives it, with fake tensors in place of weights.

    Raises:
        ValueError: it has a part that neither diffusers nor transformers has a class for.
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
        parts[name] = _part(folder / name, entry, own, mode)
    pipe = getattr(diffusers, index["_class_name"])(**parts)
    return set_scheduler(pipe, args.scheduler_kwargs), mode


def _part(folder: Path, entry: list[str], dtype: torch.dtype | None, mode: FakeTensorMode) -> Any:
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
        own = dtype or getattr(config, "dtype", None)  # transformers keeps the checkpoint's where none is asked for
        kept = set(part._keep_in_fp32_modules_strict or ())
        kept |= set(part._keep_in_fp32_modules or ()) if own == torch.float16 else set()
    else:
        with mode:
            part = cls.from_config(cls.load_config(folder))
        own, kept = dtype, set(part._keep_in_fp32_modules or ())
    return _cast(part, own or torch.float32, kept).eval()


def _cast(part: nn.Module, dtype: torch.dtype, kept: set[str]) -> nn.Module:
    """The part in a dtype, but for what its class keeps in float32; on the meta device, where weights can be moved."""

    def cast(name: str, tensor: Tensor) -> Tensor:
        is_kept = kept & set(name.split(".")) and dtype != torch.float32
        to = tensor.dtype if not tensor.is_floating_point() else torch.float32 if is_kept else dtype
        return torch.empty(tensor.shape, dtype=to, device="meta")

    _replace(part, cast)
    return part


def run_on_cpu(pipe: DiffusionPipeline, mode: FakeTensorMode) -> None:
    """Turns the weights of a prepared pipeline into fake ones on the CPU, where it can be called."""

    def fake(name: str, tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            _replace(part, fake)


def _replace(part: nn.Module, new: Callable[[str, Tensor], Tensor]) -> None:
    """Puts another tensor in place of each weight and buffer; tied ones stay one."""
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
class Measured:
    """What one micro-batch of a rollout is made of, counted on a pipeline without weights.

    Attributes:
        samples: in the micro-batch.
        step_bytes: of one recorded step of one sample, latents before and after it and what belongs to it.
        sample_bytes: of one sample, whatever the number of its trained steps: seeds and tokens.
        evaluations: forward passes of the trained network in one step, a sample: 2 with guidance in most pipelines.
        activations: bytes that autograd keeps for the backward pass of one step of the micro-batch.
        recomputed: of these, bytes of the largest block that gradient checkpointing recomputes.
    """

    samples: int
    step_bytes: int
    sample_bytes: int
    evaluations: float
    activations: int
    recomputed: int


def measure(
    policy: Policy, mode: FakeTensorMode, inputs: dict[str, Any], samples: int, args: DiffusionGRPOConfig
) -> Measured:
    """Rolls out the first step of one micro-batch and runs the network's calls in it once more, with gradient.

    Args:
        policy: of a pipeline of `weightless_pipeline`, prepared as for the training.
        mode: its.
        inputs: keyword arguments of the pipeline's call for that many samples.
        samples: in the micro-batch.
        args: of the training.
    """
    calls: list[tuple[nn.Module, tuple, dict]] = []
    with _noted(policy, calls):
        _, trajectory = rollout(
            policy,
            inputs,
            seeds=range(samples),
            num_inference_steps=args.num_inference_steps,
            steps=[[0]] * samples,
            is_complete=False,
        )
    rows = [next(x for x in pytree.tree_leaves(call[1:]) if torch.is_tensor(x) and x.ndim > 1) for call in calls]
    activations, recomputed = kept_for_backward(policy, mode, calls, args)
    per_step, per_sample = trajectory_bytes(trajectory)
    return Measured(samples, per_step, per_sample, sum(map(len, rows)) / samples, activations, recomputed)


def trajectory_bytes(trajectory: Trajectory) -> tuple[int, int]:
    """Bytes of one step of one sample, and of what a sample has beside its steps."""
    tensors = trajectory.tensors()
    by_step = [tensors.pop(name) for name in ("latents", "next_latents", "log_probs", "steps")]
    per_step = sum(_bytes(tensor) for tensor in by_step) // trajectory.steps.numel()
    return per_step, sum(_bytes(tensor) for tensor in tensors.values()) // len(trajectory)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def _noted(policy: Policy, calls: list) -> Iterator[None]:
    """Notes the calls of the trained networks in the first step of a rollout."""
    real = [network.forward for network in policy.networks]

    def noting(network: nn.Module, forward: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if policy.scheduler.driver.current == 0:
                calls.append((network, args, kwargs))
            return forward(*args, **kwargs)

        return functools.wraps(forward)(noted)

    for network, forward in zip(policy.networks, real, strict=True):
        network.forward = noting(network, forward)
    try:
        yield
    finally:
        for network in policy.networks:
            del network.forward


def kept_for_backward(
    policy: Policy, mode: FakeTensorMode, calls: list[tuple[nn.Module, tuple, dict]], args: DiffusionGRPOConfig
) -> tuple[int, int]:
    """Bytes that autograd keeps of the calls, without the weights, and of these those of the largest recomputed block.

    What a block of gradient checkpointing keeps is its inputs; while it is recomputed, all that it would keep.
    """
    weights = {_storage(x) for network in policy.networks for x in [*network.parameters(), *network.buffers()]}
    outside, largest = _Kept(weights), 0

    def checkpointed(block: Callable, *inputs: Any) -> Any:
        nonlocal largest
        inside = _Kept(weights)
        for tensor in inputs:
            if torch.is_tensor(tensor):
                outside.add(tensor)
        with inside:
            output = block(*inputs)
        largest = max(largest, inside.bytes)
        return output

    if args.activation_checkpointing:
        for network in policy.networks:
            share = args.selective_checkpointing
            network.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint_share(checkpointed, share))
    with torch.enable_grad(), outside:
        for network, positional, named in calls:
            with policy.access.forward_context():
                network(*positional, **named)
    return outside.bytes + largest, largest


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the storages that autograd keeps, each once, but for those in `known`."""

    def __init__(self, known: set[int]):
        super().__init__(self._pack, lambda tensor: tensor)
        self.known, self.bytes = set(known), 0
        self.alive: list[Tensor] = []  # a storage that is freed would give its address to the next

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> None:
        if _storage(tensor) not in self.known:
            self.known.add(_storage(tensor))
            self.alive.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
