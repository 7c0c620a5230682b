"""Refuse a pipeline that cannot be trained: its packages, scheduler, guidance, networks, LoRA and given parts.

Most checks need only its `model_index.json` (`model_index.py`), so they come before its weights are loaded.
"""

from collections.abc import Collection, Mapping
from typing import Any

import diffusers
import transformers
from accelerate.hooks import AlignDevicesHook, CpuOffload
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from diffusers.hooks.group_offloading import GroupOffloadingHook
from diffusers.models.attention import AttentionModuleMixin
from diffusers.utils.torch_utils import is_compiled_module
from peft import PeftConfig
from torch import nn

from ..config.settings import DiffusionGRPOConfig
from ..config.validate import check_token_settings
from ..distributed.backend import DistributedBackend
from ..pipelines import family_of
from ..policy.base import split_component
from ..policy.schedulers import change_scheduler, stochastic_scheduler
from ..policy.unguided import refuse_guider, refuse_unknown_scales
from .block_swap import find_hook
from .model_index import hub_kwargs, list_components, name_source, read_index
from .modular_loading import is_modular

SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
SAFE_INITS = ("true", "false", "gaussian", "orthogonal")  # they leave the base model unchanged


def check_named_model(
    model: str | DiffusionPipeline, pipeline: type[DiffusionPipeline] | None, args: DiffusionGRPOConfig
) -> None:
    """Refuse a model that lacks a package, or does not fit the scheduler's and the guidance's settings."""
    check_packages(model, args)
    if isinstance(model, str) and pipeline is not None:
        _check_named_scheduler(model, args)
    if args.is_renoised:
        _check_guider(model, pipeline, args)


def check_packages(model: str | DiffusionPipeline, args: Any) -> None:
    """Refuse a named model that needs a missing package, before weights are loaded."""
    given = args.model_init_kwargs or {}
    if isinstance(model, str) and "custom_pipeline" not in given:
        check_processors(read_index(model, args), given)


def check_processors(index: Mapping[str, Any], given: Collection[str] = ()) -> None:
    """Refuse a processor that transformers cannot build without torchvision, of which it complains after loading."""
    for name, (library, kind) in list_components(index).items():
        if name not in given and library == "transformers" and "Processor" in kind and _needs_torchvision(kind):
            raise ImportError(
                f"{index.get('_class_name')} needs torchvision for its {name}, a {kind} of transformers, which is not "
                "installed; pip install torchvision (the build that fits your PyTorch) or 'diffusion-grpo[edit]'."
            )


def _needs_torchvision(name: str) -> bool:
    """Return whether a class of transformers, or a class that it is composed of, is a placeholder for torchvision."""
    kind = getattr(transformers, name, None)
    if "torchvision" in getattr(kind, "_backends", ()):
        return True
    parts = kind.get_attributes() if hasattr(kind, "get_attributes") else []
    return "video_processor" in parts and "torchvision" in getattr(transformers.AutoVideoProcessor, "_backends", ())


def _check_named_scheduler(model: str, args: DiffusionGRPOConfig) -> None:
    """Refuse scheduler and noise settings that do not fit; for other pipelines `load_pipeline` does."""
    index = read_index(model, args)
    cls, given = getattr(diffusers, str((index.get("scheduler") or [None, None])[1]), None), args.model_init_kwargs
    if cls is None or "scheduler" in (given or {}) or is_modular(name_source(model), hub_kwargs(args)):
        return
    scheduler = cls.from_pretrained(name_source(model), subfolder="scheduler", **hub_kwargs(args))
    scheduler = change_scheduler(scheduler, args.scheduler_kwargs or {})
    if args.sigmas is not None:
        check_sigmas(scheduler)
    trained = () if args.train_component is None else split_component(args.train_component)
    libraries = [(index.get(name) or [None])[0] for name in trained]
    if "transformers" not in libraries:  # a language model draws tokens and has no scheduler
        stochastic_scheduler(scheduler, args.sde_type, args.log_prob_type)


def check_sigmas(scheduler: SchedulerMixin) -> None:
    """Refuse `sigmas` for a scheduler that does not take them as they are."""
    name = type(scheduler).__name__
    spacing = next((setting for setting in SPACINGS if scheduler.config.get(setting)), None)
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or spacing is not None:
        spaced = f" with {spacing}=True" if spacing is not None else ""
        raise ValueError(f"sigmas need a FlowMatchEulerDiscreteScheduler without spacings, not {name}{spaced}.")


def _check_guider(
    model: str | DiffusionPipeline, pipeline: type[DiffusionPipeline] | None, args: DiffusionGRPOConfig
) -> None:
    """Refuse guidance that cannot be switched off, if the algorithm trains predictions without guidance."""
    if pipeline is not None:
        refuse_unknown_scales(pipeline, args.pipeline_kwargs or {})
    if hasattr(pipeline, "guidance_scales"):  # a modular one is called without its guiders
        return
    if isinstance(model, DiffusionPipeline):
        guider = getattr(model, "guider", None)
        refuse_guider(type(model).__name__, None if guider is None else type(guider).__name__)
    elif "custom_pipeline" not in (args.model_init_kwargs or {}):
        index = read_index(model, args)
        refuse_guider(str(index.get("_class_name")), (index.get("guider") or [None, None])[1])


def check_trained_networks(
    networks: tuple[str, ...],
    pipeline: type[DiffusionPipeline],
    args: DiffusionGRPOConfig,
    backend: DistributedBackend,
) -> None:
    """Refuse networks that the settings or the processes cannot train."""
    draws_tokens = networks == (family_of(pipeline).language_model,)
    backend.check_run(networks, processes=args.world_size, own_steps=args.trains_own_steps, draws_tokens=draws_tokens)
    if draws_tokens:
        check_token_settings(args)


def check_peft_config(peft_config: PeftConfig | None) -> None:
    """Refuse adapters that make the replay differ from the rollout, or that plain diffusers could not load."""
    if peft_config is None:
        return
    if getattr(peft_config, "peft_type", None) != "LORA":
        raise ValueError(f"peft_config is {peft_config!r}; pass a LoraConfig of peft, whose weights diffusers loads.")
    if str(peft_config.init_lora_weights).lower() not in SAFE_INITS or peft_config.bias != "none":
        raise ValueError(
            f"init_lora_weights={peft_config.init_lora_weights!r} and bias={peft_config.bias!r} change the base "
            "model's own weights, which the saved LoRA does not hold; use True, 'gaussian' or 'orthogonal', and "
            "bias='none'."
        )
    for name in ("modules_to_save", "trainable_token_indices", "target_parameters"):
        if value := getattr(peft_config, name, None):
            raise ValueError(
                f"{name}={value!r} trains weights that diffusers does not load with a saved LoRA; name layers in "
                "target_modules, or train all weights without peft_config."
            )
    if peft_config.lora_dropout:
        raise ValueError(
            f"lora_dropout={peft_config.lora_dropout} would make every replay differ from its rollout; set it to 0."
        )


def check_given_parts(model: str | DiffusionPipeline, args: DiffusionGRPOConfig, trained: Collection[str]) -> None:
    """Refuse parts, loaded by the user, that are fused, compiled or offloaded, and settings to load them again."""
    if isinstance(model, DiffusionPipeline) and args.model_init_kwargs:
        raise ValueError("model_init_kwargs load a model by its name, and a pipeline was given; leave them out.")
    given = model.components if isinstance(model, DiffusionPipeline) else args.model_init_kwargs or {}
    for name, part in given.items():
        if not isinstance(part, nn.Module):
            continue
        check_offload(name, part, is_swapped=name in trained and args.group_offload is not None)
        if name in trained and is_compiled_module(part):
            raise ValueError(
                f"{name} is wrapped by torch.compile, which hides the network that is trained and saved; pass it "
                "uncompiled, and set torch_compile=True."
            )
        if name in trained and any(map(_is_fused, part.modules())):
            raise ValueError(
                f"{name} has fused projections, which a LoRA and saved weights do not reach; call "
                f"{name}.unfuse_qkv_projections() before training."
            )


def _is_fused(module: nn.Module) -> bool:
    """Return whether an attention layer runs its fused projections; older layers keep the mark when unfused."""
    processor = type(getattr(module, "processor", None)).__name__
    is_marked = getattr(module, "fused_projections", False)
    return is_marked and (isinstance(module, AttentionModuleMixin) or processor.startswith("Fused"))


def check_offload(name: str, part: nn.Module, is_swapped: bool) -> None:
    """Refuse a part that diffusers or accelerate moves, which gradients need in place."""
    # `offload_frozen` and `group_offload` leave hooks of other classes, and unloading a LoRA restores diffusers' own
    hooks = [hook for module in part.modules() if type(hook := find_hook(module)) is GroupOffloadingHook]
    on_disk = any(hook.config.offload_to_disk_path is not None for hook in hooks)
    if hooks and (on_disk or not is_swapped) or any(map(_is_offloaded, part.modules())):
        raise ValueError(
            f"{name} is moved by a device_map or by offloading of diffusers, which are made for inference; load it "
            "again (or call the pipeline's remove_all_hooks()), and set offload_frozen='cpu', or group_offload for "
            "the trained network."
        )


def _is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate offloads a module's weights."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])  # accelerate's SequentialHook has several
    return any(type(one) is CpuOffload or (isinstance(one, AlignDevicesHook) and one.offload) for one in hooks)
