"""Refuse pipelines whose parts cannot be trained, moved or loaded as they are."""

from collections.abc import Collection, Mapping
from typing import Any

import transformers
from accelerate.hooks import AlignDevicesHook, CpuOffload
from diffusers import DiffusionPipeline
from diffusers.hooks.group_offloading import GroupOffloadingHook
from diffusers.models.attention import AttentionModuleMixin
from diffusers.utils.torch_utils import is_compiled_module
from torch import nn

from ..config.settings import DiffusionGRPOConfig
from .block_swap import find_hook
from .text_encoders import list_text_encoders


def check_given_parts(model: str | DiffusionPipeline, args: DiffusionGRPOConfig, trained: Collection[str]) -> None:
    """Refuse parts, loaded by the user, that are fused, compiled, offloaded or without weights."""
    given = model.components if isinstance(model, DiffusionPipeline) else args.model_init_kwargs or {}
    parts = {name: part for name, part in given.items() if isinstance(part, nn.Module)}
    for name, part in parts.items():
        check_offload(name, part, is_swapped=name in trained and args.group_offload is not None)
        check_weights(name, part)
        if name in trained:
            check_compiled(name, part)
            check_fused(name, part)
    for name in list_text_encoders(parts) if args.cache_prompt_embeds != "off" else []:
        if is_compiled_module(parts[name]):
            raise ValueError(
                f"cache_prompt_embeds={args.cache_prompt_embeds!r}: {name} is wrapped by torch.compile and cannot "
                "leave memory; pass it uncompiled, or leave cache_prompt_embeds out."
            )


def check_compiled(name: str, network: nn.Module) -> None:
    """Refuse a network wrapped by torch.compile: the wrapper has neither the network's class nor its weights'
    names.
    """
    if is_compiled_module(network):
        raise ValueError(
            f"{name} is wrapped by torch.compile, which hides the network that is trained and saved; pass it "
            "uncompiled, and set torch_compile=True."
        )


def check_fused(name: str, network: nn.Module) -> None:
    """Refuse fused projections: LoRAs change the original ones, and saved weights are loaded into them."""
    if any(map(_is_fused, network.modules())):
        raise ValueError(
            f"{name} has fused projections: it runs to_qkv in place of to_q, to_k and to_v, which a LoRA changes and "
            f"saved weights are loaded into; call {name}.unfuse_qkv_projections() before training."
        )


def _is_fused(module: nn.Module) -> bool:
    """Return whether an attention layer runs its fused projections.

    Older layers keep the mark `fused_projections` after `unfuse_qkv_projections`, which only restores their processor.
    """
    if not getattr(module, "fused_projections", False):
        return False
    return isinstance(module, AttentionModuleMixin) or type(getattr(module, "processor", None)).__name__.startswith(
        "Fused"
    )


def check_offload(name: str, part: nn.Module, is_swapped: bool) -> None:
    """Refuse a part that diffusers or accelerate moves: the trainer moves it too, and its gradients need it in place.

    Hooks that `offload_frozen` or `group_offload` of an earlier run left behind are accepted. So is diffusers' group
    offloading if `group_offload` is set, because unloading a LoRA restores it, unless it keeps the weights on disk.
    """
    hooks = [hook for module in part.modules() if type(hook := find_hook(module)) is GroupOffloadingHook]
    on_disk = any(hook.config.offload_to_disk_path is not None for hook in hooks)
    if hooks and (on_disk or not is_swapped):
        raise ValueError(
            f"{name} is moved by diffusers' group offloading, which is made for inference only; load {name} again, "
            "and set group_offload for the trained network, or offload_frozen='cpu' for another."
        )
    if any(map(_is_offloaded, part.modules())):
        raise ValueError(
            f"{name} is moved by enable_model_cpu_offload(), enable_sequential_cpu_offload() or a device_map, with "
            "which it cannot be trained or used in training; call the pipeline's remove_all_hooks(), and set "
            "offload_frozen='cpu', or group_offload for the trained network."
        )


def _is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate offloads a module's weights."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])  # accelerate's SequentialHook has several
    return any(type(one) is CpuOffload or (isinstance(one, AlignDevicesHook) and one.offload) for one in hooks)


def check_weights(name: str, part: nn.Module) -> None:
    """Refuse a part on the meta device, which has no weights."""
    if any(weights.is_meta for weights in part.parameters()):
        raise ValueError(
            f"{name} is on the meta device and has no weights; load them with from_pretrained before training."
        )


def check_processors(index: Mapping[str, Any], given: Collection[str] = ()) -> None:
    """Refuse a pipeline whose processor transformers cannot build without torchvision, before weights are loaded.

    transformers itself complains only after everything is downloaded.
    """
    for name, entry in index.items():
        if name in given or not isinstance(entry, (list, tuple)) or entry[0] != "transformers":
            continue
        if "Processor" in str(entry[1]) and _needs_torchvision(getattr(transformers, entry[1], None)):
            raise ImportError(
                f"{index.get('_class_name')} needs torchvision for its {name}, a {entry[1]} of transformers, and it "
                "is not installed; pip install torchvision (the build that fits your PyTorch) or "
                "'diffusion-grpo[edit]'."
            )


def _needs_torchvision(kind: Any) -> bool:
    """Return whether a class of transformers, or one of the classes it is composed of, lacks torchvision."""
    if _lacks_torchvision(kind):
        return True
    parts = kind.get_attributes() if hasattr(kind, "get_attributes") else []
    return "video_processor" in parts and _lacks_torchvision(transformers.AutoVideoProcessor)


def _lacks_torchvision(kind: Any) -> bool:
    """Return whether transformers replaced a class with a placeholder because torchvision is missing."""
    return "torchvision" in getattr(kind, "_backends", ())
