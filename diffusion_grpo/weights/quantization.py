"""Quantised components: how they are loaded, whether they can be trained, and plain layers in their place for saving.

diffusers and transformers do the work; this module gives each component its configuration object.
"""

import contextlib
import dataclasses
import importlib
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from ..config.names import suggest
from ..config.quantization import QuantizationSpec, asks_for_quantization, read_spec
from ..policy.base import policy_component
from ..policy.networks import find_quantization, is_quantized_weight, replace_attribute

# torchao types whose layers pass on gradients: rounded activations block them, and PEFT has no LoRA for int4
TORCHAO_TRAINABLE = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
NO_NETWORKS = ("Tokenizer", "TokenizerFast", "Scheduler", "Processor", "FeatureExtractor")  # ends of class names
Components = Mapping[str, tuple[str, str]]  # library and class of each part of a pipeline


# Loading


@dataclasses.dataclass(frozen=True)
class QuantizedLoading:
    """The components to quantise while a pipeline is loaded by its name."""

    specs: Mapping[str, Any]
    components: Components
    trained: tuple[str, ...]

    @property
    def trains_quantized(self) -> str | None:
        """Name of a trained network that is quantised; None if there is none."""
        return next((name for name in self.trained if name in self.specs), None)

    def check(self, is_full_training: bool) -> None:
        """Refuse what cannot be loaded, trained or saved, before anything is loaded."""
        if is_full_training and self.trains_quantized is not None:
            _refuse_full_training(self.trains_quantized)
        for name, spec in self.specs.items():
            check_gpu(name, spec)
            if is_full_training and name_method(spec) == "quanto":  # the end of a run writes the whole pipeline
                raise ValueError(
                    f"quantization: {name}: full training saves the whole pipeline, and transformers cannot save what "
                    "quanto has quantised; use torchao or bitsandbytes for it."
                )

    def keywords(self, source: Any, dtype: Any, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Make the keyword arguments of `from_pretrained` that quantise components; load those from gguf files."""
        configs, loaded = {}, {}
        for name, spec in self.specs.items():
            library, kind = self.components[name]
            compute = dtype.get(name, dtype.get("default")) if isinstance(dtype, dict) else dtype
            is_gguf = getattr(spec, "backend", "") == "gguf"
            try:
                config = make_config(spec, library, compute) if isinstance(spec, QuantizationSpec) else spec
                cls = getattr(diffusers, kind) if is_gguf else None
            except (AttributeError, TypeError) as error:  # no such class, or no such argument
                raise ValueError(f"quantization: {name}: {error}.") from error
            if is_gguf:
                where = {"config": str(source), "subfolder": name, "dtype": config.compute_dtype, **hub}
                loaded[name] = cls.from_single_file(spec.options["file"], quantization_config=config, **where)
            else:
                configs[name] = config
        return loaded | ({"quantization_config": PipelineQuantizationConfig(quant_mapping=configs)} if configs else {})


def choose_specs(args: Any, components: Components, trained: tuple[str, ...]) -> dict[str, Any]:
    """Return how to quantise each component for which the settings ask it; see [`QuantizedLoading`]."""
    specs: dict[str, Any] = {}
    if args.load_in_4bit or args.load_in_8bit:
        bits, options = "8bit", {}
        if args.load_in_4bit:
            bits, options = "4bit", {"bnb_4bit_quant_type": args.bnb_4bit_quant_type}
            options["bnb_4bit_use_double_quant"] = args.use_bnb_nested_quant
            if args.bnb_4bit_quant_storage is not None:
                options["bnb_4bit_quant_storage"] = args.bnb_4bit_quant_storage
        spec = QuantizationSpec(f"bitsandbytes_{bits}", options)
        large = [name for name, (library, kind) in components.items() if _is_large_encoder(name, library, kind)]
        specs = {name: spec for name in (*trained, *large) if name in components}
    for name, entry in (args.quantization or {}).items():
        _check_component(name, components)
        specs.pop(name, None)
        spec = entry if hasattr(entry, "quant_method") else read_spec(name, entry)
        specs |= {} if spec is None else {name: spec}
    return specs


def _is_large_encoder(name: str, library: str, kind: str) -> bool:
    """Return whether a component is a text encoder worth quantising: a T5 or a language model, but not a CLIP."""
    return name.startswith("text_encoder") and library == "transformers" and not kind.startswith("CLIP")


def _check_component(name: str, components: Components) -> None:
    networks = [
        part
        for part, (library, kind) in components.items()
        if library in ("diffusers", "transformers") and not kind.endswith(NO_NETWORKS)
    ]
    if name not in networks:
        hint = suggest(name, networks)
        raise ValueError(f"quantization: the pipeline has no network {name!r}; it has {', '.join(networks)}.{hint}")


def check_gpu(name: str, spec: Any) -> None:
    """Refuse bitsandbytes without a GPU, which diffusers would do while it loads."""
    has_gpu = torch.cuda.is_available() or torch.xpu.is_available() or torch.mps.is_available()
    if (name_method(spec) or "").startswith("bitsandbytes") and not has_gpu:
        raise ValueError(
            f"{name} is to be quantised by bitsandbytes (load_in_4bit, load_in_8bit), which needs a GPU, and there is "
            f"none here; quantization: {{{name}: torchao}} works on a CPU too."
        )


def make_config(spec: QuantizationSpec, library: str, dtype: torch.dtype | None) -> Any:
    """Make the configuration object with which a component is loaded."""
    home, options = {"diffusers": diffusers, "transformers": transformers}[library], dict(spec.options)
    dtype = dtype or torch.float32
    if spec.backend == "gguf":
        return diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    if spec.backend == "bitsandbytes_4bit":
        usual = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        return home.BitsAndBytesConfig(load_in_4bit=True, **usual | options)
    if spec.backend == "bitsandbytes_8bit":
        return home.BitsAndBytesConfig(load_in_8bit=True, **options)
    if spec.backend == "quanto":
        name = "weights_dtype" if library == "diffusers" else "weights"
        return home.QuantoConfig(**{name: options.pop("weights_dtype", "int8")}, **options)
    kind, kwargs = options.pop("quant_type", TORCHAO_TRAINABLE[0]), options.pop("quant_type_kwargs", None) or {}
    if isinstance(kind, str):
        kind = getattr(importlib.import_module("torchao.quantization"), kind)(**kwargs)
    return home.TorchAoConfig(quant_type=kind, **options)


# What is quantised, and whether it can be trained


def describe_quantization(pipe: DiffusionPipeline) -> dict[str, str]:
    """Return how each quantised network of a pipeline is quantised, by name."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    methods = {name: find_quantization(part) for name, part in parts.items()}
    return {name: method for name, method in methods.items() if method is not None}


def list_trained_methods(
    model: str | DiffusionPipeline, train_component: str | None, loading: QuantizedLoading | None
) -> set[str]:
    """Return the methods by which the trained networks are, or will be, quantised; empty if they are not."""
    if isinstance(model, DiffusionPipeline):
        networks = [getattr(model, name) for name in policy_component(model, train_component)]
        methods = {find_quantization(network) for network in networks}
    else:
        methods = set() if loading is None else {name_method(loading.specs.get(name)) for name in loading.trained}
    return methods - {None}


def name_method(spec: Any) -> str | None:
    """Return the method of a specification or a configuration object, named as by `find_quantization`."""
    if spec is None or isinstance(spec, QuantizationSpec):
        return getattr(spec, "backend", None)
    return find_quantization(types.SimpleNamespace(hf_quantizer=types.SimpleNamespace(quantization_config=spec)))


def check_given_pipeline(args: Any) -> None:
    """Refuse quantisation settings for a pipeline object, which is loaded already."""
    if asks_for_quantization(args):
        name = next(name for name in ("load_in_4bit", "load_in_8bit", "quantization") if getattr(args, name))
        raise ValueError(
            f"{name} is for a model given by its name, but model is a pipeline, whose weights are loaded already; "
            f"leave {name} out, or quantise in DiffusionPipeline.from_pretrained(..., quantization_config=...)."
        )


def check_quantized_training(name: str, network: nn.Module, is_full_training: bool) -> None:
    """Refuse to train a network whose kind of quantisation does not allow it."""
    method = find_quantization(network)
    if method is None:
        return
    if is_full_training:
        _refuse_full_training(name)
    if method == "gguf":  # diffusers calls it untrainable, but its layers pass gradients to their input
        if os.environ.get("DIFFUSERS_GGUF_CUDA_KERNELS", "false").lower() in ("1", "true", "yes"):
            raise ValueError(f"unset DIFFUSERS_GGUF_CUDA_KERNELS: its kernels for {name} pass no gradient on.")
        return
    quantizer = network.hf_quantizer
    kind = type(getattr(quantizer.quantization_config, "quant_type", None)).__name__
    if not quantizer.is_trainable or (method == "torchao" and kind not in TORCHAO_TRAINABLE):
        shown = f"torchao's {kind}" if method == "torchao" else method
        raise ValueError(
            f"{name} is quantised with {shown}, on which no LoRA can be trained; load it with bitsandbytes, quanto or "
            "torchao's Int8WeightOnlyConfig."
        )


def _refuse_full_training(name: str) -> None:
    raise ValueError(
        f"Full training cannot move the quantised weights of {name}; train a LoRA (peft_config, or use_peft: true), "
        "or load it without quantisation."
    )


# Saving as plain weights


def dequantize_weight(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    weight = layer.weight
    if type(weight).__name__ == "GGUFParameter":
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor  # needs the package gguf

        weight = dequantize_gguf_tensor(weight)
    elif type(weight).__module__.startswith("optimum."):  # quanto
        weight = weight.dequantize()
    else:
        weight = dequantize_module_weight(layer)
    return weight.detach().to(dtype)


def make_plain_layer(layer: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """Make a plain layer on the CPU that computes the same as a quantised one."""
    weight = dequantize_weight(layer, dtype)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.cpu(), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to("cpu", dtype), requires_grad=False)
    return plain


@contextlib.contextmanager
def show_plain_layers(network: nn.Module) -> Iterator[None]:
    """Replace quantised layers by plain ones on the CPU inside this context, also in the network's config."""
    layers = {
        name: layer
        for name, layer in network.named_modules()
        if not isinstance(layer, BaseTunerLayer)
        and layer._parameters.get("weight") is not None
        and is_quantized_weight(layer.weight)
    }
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            path, _, last = name.rpartition(".")
            parent = network.get_submodule(path)
            stack.callback(setattr, parent, last, layer)
            setattr(parent, last, make_plain_layer(layer, network.dtype))
        config = dict(network.config)
        config.pop("quantization_config", None)
        stack.enter_context(replace_attribute(network, "_internal_dict", type(network.config)(config)))
        stack.enter_context(replace_attribute(network, "hf_quantizer", None))
        yield
