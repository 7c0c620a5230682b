"""Load a pipeline with quantised components, and tell which of a pipeline's networks are quantised.

diffusers and transformers do the work; this module gives each component its configuration object. Networks that cannot
be trained are refused before a model is loaded.
"""

import dataclasses
import importlib
import os
import types
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from torch import nn

from ..config.quantization import TORCHAO_TRAINABLE, QuantizationSpec, check_specs, choose_specs
from ..policy.base import policy_component
from ..policy.quantized import find_quantization
from .trained_networks import choose_networks, list_components


@dataclasses.dataclass(frozen=True)
class QuantizedLoading:
    """The components to quantise while a pipeline is loaded by its name.

    Attributes:
        specs: how to quantise each such component; see [`~diffusion_grpo.config.quantization.choose_specs`].
        components: library and class of each part of the pipeline.
        trained: names of the trained networks.
    """

    specs: Mapping[str, Any]
    components: Mapping[str, tuple[str, str]]
    trained: tuple[str, ...]

    @property
    def trains_quantized(self) -> str | None:
        """Name of a trained network that is quantised; None if there is none."""
        return next((name for name in self.trained if name in self.specs), None)

    def check(self, is_full_training: bool) -> None:
        """Refuse components that cannot be loaded or trained on this machine.

        Raises:
            ValueError: all weights of a quantised network are to be trained, the backend does not support the
                component, or there is no GPU for bitsandbytes.
            ImportError: the backend's package is not installed.
        """
        if is_full_training and self.trains_quantized is not None:
            raise ValueError(refuse_full_training(self.trains_quantized))
        check_specs(self.specs, self.components, self.trained)
        for name, spec in self.specs.items():
            if isinstance(spec, QuantizationSpec):
                check_gpu(name, spec)
                if is_full_training and spec.backend == "quanto":
                    raise ValueError(
                        f"quantization: {name}: full training saves the whole pipeline at its end, and transformers "
                        "cannot save what quanto has quantised; use torchao or bitsandbytes for it."
                    )

    def keywords(self, source: Any, dtype: Any, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Make the keyword arguments of `from_pretrained` that quantise components; load those from gguf files.

        Args:
            source: Hub id or folder of the pipeline.
            dtype: dtype of the other weights, as for `from_pretrained`; quantised layers compute in it.
            hub: keyword arguments that say where and how to look on the Hub.
        """
        configs, loaded = {}, {}
        for name, spec in self.specs.items():
            library, kind = self.components[name]
            own = dtype.get(name, dtype.get("default")) if isinstance(dtype, dict) else dtype
            if isinstance(spec, QuantizationSpec) and spec.backend == "gguf":
                where = {"config": str(source), "subfolder": name, **hub}
                loaded[name] = load_gguf(getattr(diffusers, kind), spec.options["file"], own, where)
            else:
                configs[name] = make_config(spec, library, own) if isinstance(spec, QuantizationSpec) else spec
        return loaded | ({"quantization_config": PipelineQuantizationConfig(quant_mapping=configs)} if configs else {})


def plan_loading(args: Any, index: Mapping[str, Any], train_component: str | None) -> QuantizedLoading:
    """Determine which components of a pipeline the settings quantise.

    Args:
        args: configuration of the run.
        index: contents of the pipeline's `model_index.json`.
        train_component: the setting of the same name.

    Raises:
        ValueError: see [`~diffusion_grpo.config.quantization.choose_specs`].
    """
    components = list_components(index)
    trained = choose_networks(components, train_component)
    return QuantizedLoading(choose_specs(args, components, trained), components, trained)


def refuse_given_pipeline(args: Any) -> str:
    """Return the message for quantization settings that come too late for a pipeline object."""
    name = next(name for name in ("load_in_4bit", "load_in_8bit", "quantization") if getattr(args, name))
    return (
        f"{name} is for a model given by its name, but model is a pipeline, whose weights are loaded already; leave "
        f"{name} out, or quantise in DiffusionPipeline.from_pretrained(..., quantization_config=...)."
    )


def refuse_full_training(name: str) -> str:
    """Return the message for full training of a quantised network."""
    return (
        f"Full training cannot move the quantised weights of {name}; train a LoRA (peft_config, or use_peft: true), "
        "or load it without quantisation."
    )


def check_gpu(name: str, spec: QuantizationSpec) -> None:
    """Refuse bitsandbytes without a GPU, which diffusers needs to quantise with it.

    Raises:
        ValueError: there is no GPU.
    """
    has_gpu = torch.cuda.is_available() or torch.xpu.is_available() or torch.mps.is_available()
    if spec.package == "bitsandbytes" and not has_gpu:
        raise ValueError(
            f"{spec.source}: bitsandbytes quantises {name} on a GPU, and there is none here; use a machine with a "
            f"GPU, or set quantization: {{{name}: torchao}}, which works on a CPU too."
        )


def make_config(spec: QuantizationSpec, library: str, dtype: torch.dtype | None) -> Any:
    """Make the configuration object with which a component is loaded.

    Args:
        spec: how to quantise the component.
        library: library of the network, "diffusers" or "transformers"; each has its own classes.
        dtype: dtype in which 4-bit layers compute; None for float32.

    Raises:
        ValueError: torchao has no such `quant_type`, or another option is wrong.
    """
    home, options = {"diffusers": diffusers, "transformers": transformers}[library], dict(spec.options)
    if spec.package == "bitsandbytes":
        bits = {"bitsandbytes_4bit": "load_in_4bit", "bitsandbytes_8bit": "load_in_8bit"}[spec.backend]
        if bits == "load_in_4bit":
            options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype or torch.float32} | options
        return home.BitsAndBytesConfig(**{bits: True}, **options)
    if spec.backend == "quanto":
        weights = options.pop("weights_dtype", "int8")
        name = "weights_dtype" if library == "diffusers" else "weights"
        return home.QuantoConfig(**{name: weights}, **options)
    kind, kwargs = options.pop("quant_type", "Int8WeightOnlyConfig"), options.pop("quant_type_kwargs", None) or {}
    return home.TorchAoConfig(quant_type=make_torchao_type(kind, kwargs), **options)


def make_torchao_type(kind: Any, kwargs: Mapping[str, Any]) -> Any:
    """Make torchao's configuration of a given name; a configuration object is returned as it is.

    Raises:
        ValueError: torchao has no such class, or it lacks an option.
    """
    if not isinstance(kind, str):
        return kind
    found = getattr(importlib.import_module("torchao.quantization"), kind, None)
    if not isinstance(found, type) or not kind.endswith("Config"):
        raise ValueError(
            f"quantization: torchao has no quant_type {kind!r}; name a class of torchao.quantization, such as "
            "Int8WeightOnlyConfig."
        )
    try:
        return found(**kwargs)
    except TypeError as error:
        raise ValueError(f"quantization: quant_type_kwargs of {kind}: {error}.") from error


def load_gguf(kind: type[nn.Module], file: str, dtype: torch.dtype | None, where: Mapping[str, Any]) -> nn.Module:
    """Load a network from a gguf file.

    Args:
        kind: class of the network in diffusers.
        file: path, or address on the Hub.
        dtype: dtype in which its layers compute; None for float32.
        where: keyword arguments of `from_single_file` that say where the network's configuration is.
    """
    dtype = dtype or torch.float32
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    return kind.from_single_file(file, quantization_config=config, dtype=dtype, **where)


def describe_quantization(pipe: DiffusionPipeline) -> dict[str, str]:
    """Return how each quantised network of a pipeline is quantised, by name."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    found = {name: find_quantization(part) for name, part in parts.items()}
    return {name: method for name, method in found.items() if method is not None}


def list_trained_methods(
    model: str | DiffusionPipeline, train_component: str | None, loading: QuantizedLoading | None
) -> set[str]:
    """Return the methods by which the trained networks are, or will be, quantised; empty if they are not.

    Args:
        model: as the user gave it.
        train_component: the setting of the same name.
        loading: the components to quantise while a model is loaded by its name.
    """
    if isinstance(model, DiffusionPipeline):
        networks = [getattr(model, name) for name in policy_component(model, train_component)]
        found = {find_quantization(network) for network in networks}
    else:
        specs = [loading.specs.get(name) for name in loading.trained] if loading is not None else []
        found = {name_method(spec) for spec in specs}
    return found - {None}


def name_method(spec: Any) -> str | None:
    """Return the method of a specification or a configuration object, named as by `find_quantization`."""
    if spec is None or isinstance(spec, QuantizationSpec):
        return getattr(spec, "backend", None)
    return find_quantization(types.SimpleNamespace(hf_quantizer=types.SimpleNamespace(quantization_config=spec)))


def check_quantized_training(name: str, network: nn.Module, is_full_training: bool) -> None:
    """Refuse to train a network whose kind of quantisation does not allow it.

    Args:
        name: name of the network in the pipeline.
        network: the network, quantised or not.
        is_full_training: whether all its weights are trained.

    Raises:
        ValueError: the network cannot be trained; the message says what to change.
    """
    method = find_quantization(network)
    if method is None:
        return
    if is_full_training:
        raise ValueError(refuse_full_training(name))
    if method == "gguf":  # diffusers calls it untrainable, but its layers pass gradients to their input
        if os.environ.get("DIFFUSERS_GGUF_CUDA_KERNELS", "false").lower() in ("1", "true", "yes"):
            raise ValueError(
                f"DIFFUSERS_GGUF_CUDA_KERNELS is set, but the fused kernels for {name}'s gguf weights have no "
                "gradient; unset it."
            )
        return
    quantizer = network.hf_quantizer
    kind = type(getattr(quantizer.quantization_config, "quant_type", None)).__name__
    if not quantizer.is_trainable or (method == "torchao" and kind not in TORCHAO_TRAINABLE):
        shown = f"torchao's {kind}" if method == "torchao" else method
        raise ValueError(
            f"{name} is quantised with {shown}, on which no LoRA can be trained; load it with bitsandbytes, quanto or "
            "torchao's Int8WeightOnlyConfig."
        )
