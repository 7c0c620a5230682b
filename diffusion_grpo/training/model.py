"""Load and prepare the pipeline to train.

A Hub id, a folder, "tiny" or a pipeline becomes a pipeline with everything frozen and in eval mode, and the model to
train: its network, or a LoRA around it. Device, dtype, quantisation, lazy encoders and checkpointing are chosen here
too.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import PeftConfig
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config.quantization import asks_for_quantization
from ..config.settings import DiffusionGRPOConfig, has_apple_gpu
from ..distributed import late_weights
from ..distributed.backend import DistributedBackend
from ..pipelines import family_of
from ..policy.base import POLICY_COMPONENTS, policy_component, split_component
from ..policy.schedulers import change_scheduler
from ..weights import lora
from ..weights.files import find_variant
from ..weights.quantization import QuantizedLoading, check_given_pipeline, check_quantized_training, choose_specs
from .block_swap import BlockSwap
from .compiling import compile_blocks
from .decoding import set_decoding
from .lazy_modules import LazyModule, is_part_of_encoding, make_lazy_modules, restore_encoders
from .model_checks import check_peft_config, check_sigmas
from .model_index import choose_networks, hub_kwargs, list_components, name_source, pipeline_class, read_index
from .modular_loading import is_modular, load_components


def name_model(model: str | DiffusionPipeline) -> str:
    """Return the user's name for the model, or where the pipeline was loaded from."""
    return model if isinstance(model, str) else str(model.config.get("_name_or_path") or type(model).__name__)


def plan_quantization(
    model: str | DiffusionPipeline, args: DiffusionGRPOConfig, is_full_training: bool
) -> QuantizedLoading | None:
    """Determine and check the components to quantise while loading the pipeline; return None if there are none."""
    if isinstance(model, DiffusionPipeline):
        check_given_pipeline(args)
        return None
    if not asks_for_quantization(args):
        return None
    components = list_components(read_index(model, args))
    trained = choose_networks(components, args.train_component)
    loading = QuantizedLoading(choose_specs(args, components, trained), components, trained)
    loading.check(is_full_training)
    return loading


def load_pipeline(
    model: str | DiffusionPipeline,
    args: DiffusionGRPOConfig,
    is_full_training: bool,
    backend: DistributedBackend | None = None,
    quantized: QuantizedLoading | None = None,
    parts: dict[str, Any] | None = None,
) -> DiffusionPipeline:
    """Load a pipeline by its name, with `model_init_kwargs`; return a given one with all of its parts."""
    if isinstance(model, DiffusionPipeline):
        restore_encoders(model)
        return set_up_pipeline(model, args)
    return set_up_pipeline(_load_parts(model, args, is_full_training, backend, quantized, parts or {}), args)


def _load_parts(
    model: str,
    args: DiffusionGRPOConfig,
    is_full_training: bool,
    backend: DistributedBackend | None,
    quantized: QuantizedLoading | None,
    parts: dict[str, Any],
) -> DiffusionPipeline:
    source, kwargs = name_source(model), dict(args.model_init_kwargs or {})
    dtype = choose_dtype(args, is_full_training)
    if quantized is not None:
        dtype = dtype or torch.float32  # otherwise torchao would use bfloat16 for its own part alone
        remaining = dataclasses.replace(quantized, specs={k: v for k, v in quantized.specs.items() if k not in parts})
        kwargs |= remaining.keywords(source, dtype, hub_kwargs(args))
    if dtype is not None:
        if "dtype" not in kwargs:
            kwargs.pop("torch_dtype", None)  # diffusers' former name for it
        kwargs["dtype"] = dtype
    is_late = backend is not None and backend.shards_weights
    with late_weights.read_late(name_networks(args)) if is_late else contextlib.nullcontext():
        # diffusers' base class would not take a part that its class may lack, as Wan's may one of two networks
        cls = pipeline_class(model, args) if parts else None
        return from_pretrained(model, cls or DiffusionPipeline, **kwargs | parts)


def from_pretrained(model: str, cls: type[DiffusionPipeline] = DiffusionPipeline, **kwargs: Any) -> DiffusionPipeline:
    """Load a pipeline as diffusers does; if a folder has weights only of a variant, such as fp16, load that one."""
    source = name_source(model)
    kwargs = {"variant": find_variant(source)} | kwargs
    load = load_components if is_modular(source, kwargs) else cls.from_pretrained
    return load(source, **kwargs)


def set_up_pipeline(pipe: DiffusionPipeline, args: DiffusionGRPOConfig) -> DiffusionPipeline:
    """Apply the scheduler and decoding settings to a pipeline."""
    if args.scheduler_kwargs:
        pipe.scheduler = change_scheduler(pipe.scheduler, args.scheduler_kwargs)
    if args.sigmas is not None:
        check_sigmas(pipe.scheduler)
    return set_decoding(pipe, args.vae_slicing, args.vae_tiling, args.decode_batch_size)


def loads_encoders_late(model: str | DiffusionPipeline, args: DiffusionGRPOConfig) -> bool:
    """Return whether text encoders are loaded only if a prompt is not in the cache."""
    given = args.model_init_kwargs or {}
    # a LoRA may have layers in an encoder, and only its contents can identify an object
    if not isinstance(model, str) or args.cache_prompt_embeds == "off" or args.lora_path is not None:
        return False
    if is_modular(name_source(model), hub_kwargs(args)):
        return False
    parts = [part for name, part in given.items() if is_part_of_encoding(name)]
    return "custom_pipeline" not in given and all(part is None or isinstance(part, str) for part in parts)


def make_lazy_encoders(model: str | DiffusionPipeline, args: DiffusionGRPOConfig) -> dict[str, LazyModule]:
    """Return lazy modules for a named model's text encoders; none if the encoders are loaded at once."""
    if not loads_encoders_late(model, args):
        return {}
    dtype = choose_dtype(args, is_full_training=False)
    made = make_lazy_modules(name_source(model), dtype, **hub_kwargs(args))
    return {name: part for name, part in made.items() if name not in (args.model_init_kwargs or {})}


def load_encoder(
    model: str,
    args: DiffusionGRPOConfig,
    is_full_training: bool,
    quantized: QuantizedLoading | None,
    pipe: DiffusionPipeline,
    name: str,
) -> nn.Module:
    """Load one component of a named model as `load_pipeline` would, taking the other components from `pipe`."""
    parts = {key: part for key, part in pipe.components.items() if key != name}
    return getattr(_load_parts(model, args, is_full_training, None, quantized, parts), name)


def choose_dtype(args: DiffusionGRPOConfig, is_full_training: bool) -> torch.dtype | dict[str, torch.dtype] | None:
    """Return the `dtype` that `load_pipeline` requests; None if `model_init_kwargs` leaves it to diffusers."""
    kwargs = args.model_init_kwargs or {}
    for key in ("dtype", "torch_dtype"):  # the latter is diffusers' former name
        if key in kwargs:
            return None if kwargs[key] is None else _read_dtype(key, kwargs[key])
    if not (args.bf16 or args.fp16):
        return torch.float32  # diffusers would load text encoders as they were saved, often in half precision
    half = torch.bfloat16 if args.bf16 else torch.float16
    return {**dict.fromkeys(name_networks(args), torch.float32), "default": half} if is_full_training else half


def _read_dtype(key: str, value: Any) -> torch.dtype | dict[str, torch.dtype]:
    if isinstance(value, dict):
        return {name: _read_dtype(f"{key}: {name}", part) for name, part in value.items()}
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} is {value!r}, which is not a torch dtype; write bfloat16 or float32.")
    return dtype


def check_gradient_range(model: str | DiffusionPipeline, args: DiffusionGRPOConfig) -> None:
    """Refuse a network in float16 without the loss scaling of `fp16`: most of its gradients would be 0."""
    if args.fp16:
        return
    wanted = choose_dtype(args, is_full_training=False) if isinstance(model, str) else {}
    for name in name_networks(args):
        if isinstance(model, str):
            dtype = wanted.get(name, wanted.get("default")) if isinstance(wanted, dict) else wanted
        else:
            dtype = getattr(getattr(model, name, None), "dtype", None)
        if dtype == torch.float16:
            raise ValueError(
                "The network would be trained in float16, where most gradients are 0; load it in bfloat16 or float32, "
                "or set fp16=True, which scales the loss."
            )


def name_networks(args: DiffusionGRPOConfig) -> tuple[str, ...]:
    """Return the names of components that may be trained in a pipeline that is not loaded yet."""
    if args.train_component:
        return split_component(args.train_component)
    return (*POLICY_COMPONENTS, *(f"{name}_2" for name in POLICY_COMPONENTS))


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name; by default the accelerator if there is one that can train, else the CPU."""
    if name is None:
        accelerator = None if has_apple_gpu() else torch.accelerator.current_accelerator(check_available=True)
        return accelerator or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {name!r} is not a torch device.") from error


def load_plain_pipeline(
    model: str,
    dtype: str | None = None,
    device: str | None = None,
    is_placed: bool = True,
    model_init_kwargs: dict[str, Any] | None = None,
) -> DiffusionPipeline:
    """Load a Hub id, a folder or `tiny` unchanged."""
    kwargs, place = dict(model_init_kwargs or {}), choose_device(device)
    former = kwargs.pop("torch_dtype", "float32" if place.type == "cpu" else "bfloat16")
    kwargs["dtype"] = _read_dtype("dtype", dtype or kwargs.get("dtype", former))
    pipe = from_pretrained(model, **kwargs)
    return pipe.to(place) if is_placed else pipe


def prepare_model(
    pipe: DiffusionPipeline,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    backend: DistributedBackend | None = None,
) -> tuple[tuple[str, ...], nn.Module]:
    """Freeze everything in the pipeline that is not trained, and return the model to train."""
    component = policy_component(pipe, args.train_component)
    _check_together(pipe, component)
    for name in component:
        is_full_training = peft_config is None and args.lora_path is None and args.lora_adapter is None
        check_quantized_training(name, getattr(pipe, name), is_full_training)
    adapter = _find_adapter(pipe, component, args, peft_config)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
            # decoders, through which gradients of rewards flow; Wan's has none
            is_able = hasattr(part, "decode") and getattr(part, "_supports_gradient_checkpointing", False)
            if args.takes_gradients and args.activation_checkpointing and is_able:
                _enable_checkpointing(part, args.activation_checkpointing_kwargs or {})
    # it casts the VAE to float32 for decoding and back before a backward pass could come
    vae = getattr(pipe, "vae", None) if args.takes_gradients and hasattr(pipe, "upcast_vae") else None
    if vae is not None and vae.dtype == torch.float16 and vae.config.force_upcast:
        raise ValueError(
            f"loss_type='draft': {type(pipe).__name__} casts a VAE in float16 to and fro, so no gradient can flow "
            "through it; set bf16=True, or fp16=False."
        )
    models = {name: _prepare_network(getattr(pipe, name), args, peft_config, adapter, backend) for name in component}
    family = family_of(pipe)
    if component == (family.language_model,):
        for name in family.without_gradient:
            getattr(pipe, component[0]).get_submodule(name).requires_grad_(False)
    model = models[component[0]] if len(component) == 1 else nn.ModuleDict(models).eval()
    # Trainer calls this method of transformers' models; diffusers' have another one, called above
    model.activation_checkpointing_enable = lambda **kwargs: None
    if args.group_offload is not None:
        model.to = lambda *args, **kwargs: model  # Trainer and accelerate would move all of it to the accelerator
    return component, model


def _check_together(pipe: DiffusionPipeline, names: tuple[str, ...]) -> None:
    language = family_of(pipe).language_model
    if len(names) > 1 and language in names:
        raise ValueError(
            f"train_component={', '.join(names)!r}: tokens of {language} and denoising steps cannot be trained in one "
            "run; name one of them, and train the other in a second run."
        )


def _find_adapter(
    pipe: DiffusionPipeline, names: tuple[str, ...], args: DiffusionGRPOConfig, peft_config: PeftConfig | None
) -> str | None:
    """Return the name of the LoRA to train, after loading one that is trained further; None for full training."""
    if args.lora_path is not None:
        adapter = lora.load_lora(pipe, names, args.lora_path, args.keep_adapters)
    else:
        is_full_training = peft_config is None and args.lora_adapter is None
        lora.check_adapters(pipe, names, args.lora_adapter, args.keep_adapters, is_full_training)
        if is_full_training:
            return None
        adapter = args.lora_adapter or lora.choose_adapter_name(pipe)
    lora.unwrap(pipe, names)
    for name in names if peft_config is None else []:
        check_peft_config(lora.copy_config(getattr(pipe, name), adapter))
    return adapter


def _prepare_network(
    network: nn.Module,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    adapter: str | None,
    backend: DistributedBackend | None,
) -> nn.Module:
    """Return the model to train: the network with a LoRA around it, or with all its weights trainable."""
    swap = make_block_swap(args)
    if args.activation_checkpointing:
        contexts = None if swap is None else swap.contexts
        given = args.activation_checkpointing_kwargs or {}
        _enable_checkpointing(network, given, args.selective_checkpointing, contexts)
    else:
        _disable_checkpointing(network)
    if adapter is not None:
        if getattr(peft_config, "use_dora", False):  # DoRA starts from the norms of the weights
            late_weights.fill(network.parameters())
        model = lora.wrap_lora(network, peft_config, adapter, args.sync_ref_model).eval()
    else:
        _require_float32_weights(network, args)
        cast = late_weights.hold if backend is not None and backend.shards_weights else nn.Module.to
        model = cast(network, torch.float32).requires_grad_(True)
    if args.torch_compile:
        compiles = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        compile_blocks(network, compiles, is_hooked=swap is not None)
    if swap is not None:
        swap.install(network)
    return model


def make_block_swap(args: DiffusionGRPOConfig, device: torch.device | None = None) -> BlockSwap | None:
    """Make the block swap that keeps a network's frozen weights in CPU memory; return None without `group_offload`."""
    if args.group_offload is None:
        return None
    return BlockSwap(device or args.device, args.group_offload, args.group_offload_blocks, args.group_offload_stream)


def _require_float32_weights(network: nn.Module, args: DiffusionGRPOConfig) -> None:
    """Refuse half-precision weights unless mixed precision is on: an optimizer's small steps vanish in them."""
    if network.dtype != torch.float32 and not (args.bf16 or args.fp16):
        raise ValueError(
            f"Full training needs float32 weights, but {type(network).__name__} has {network.dtype}; load it in "
            "float32, set bf16=True, or train a LoRA with peft_config."
        )


def _enable_checkpointing(
    network: nn.Module, kwargs: dict[str, Any], share: float = 1.0, contexts: Callable | None = None
) -> None:
    kwargs = {"use_reentrant": False, **kwargs}
    if getattr(network, "supports_gradient_checkpointing", False):  # transformers' attribute
        network.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        layers = [layer for layer in network.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for place, layer in enumerate(layers):
            layer.gradient_checkpointing = _is_chosen(place, share)
        return
    if not getattr(network, "_supports_gradient_checkpointing", False):
        raise ValueError(
            f"{type(network).__name__} has no gradient checkpointing in diffusers; set gradient_checkpointing=False."
        )
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, **kwargs)
    network.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint_share(checkpoint, share, contexts))


def _disable_checkpointing(network: nn.Module) -> None:
    """Switch off checkpointing, which the user or an earlier run may have switched on."""
    if getattr(network, "supports_gradient_checkpointing", False):
        network.activation_checkpointing_disable()
    elif getattr(network, "_supports_gradient_checkpointing", False):
        network.disable_gradient_checkpointing()


def checkpoint_share(checkpoint: Callable, share: float, contexts: Callable | None = None) -> Callable:
    """Checkpoint a share of the blocks, evenly spread, like DanceGRPO's `selective_checkpointing`."""
    places: dict[Callable, int] = {}  # position of each block in the order of the network's calls

    def checkpointed(block: Callable, *args: Any, **kwargs: Any) -> Any:
        place = places.setdefault(block, len(places))
        if not _is_chosen(place, share):
            return block(*args, **kwargs)
        context = {} if contexts is None else {"context_fn": functools.partial(contexts, block)}
        return checkpoint(block, *args, **kwargs, **context)

    return checkpointed


def _is_chosen(place: int, share: float) -> bool:
    return math.floor((place + 1) * share + 0.5) > math.floor(place * share + 0.5)


def check_reentrant(args: DiffusionGRPOConfig, is_full_training: bool) -> None:
    """Refuse reentrant checkpointing with a LoRA: blocks whose inputs need no gradient would get none themselves."""
    is_reentrant = args.activation_checkpointing and (args.activation_checkpointing_kwargs or {}).get("use_reentrant")
    if is_reentrant and not is_full_training:
        raise ValueError(
            "gradient_checkpointing_kwargs: use_reentrant=True gives a LoRA no gradient, because the inputs of the "
            "network's blocks are frozen; leave it out."
        )
