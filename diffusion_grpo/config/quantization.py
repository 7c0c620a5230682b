"""Settings of a quantised base model: a base of `DiffusionGRPOConfig`, and how they are read, without torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .names import suggest

# diffusers' names of the backends, and the package that each one needs
BACKENDS = {
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "torchao": "torchao",
    "gguf": "gguf",
    "quanto": "optimum.quanto",
}
OPTIONS = {  # arguments of the backends' configuration classes
    "bitsandbytes_4bit": (
        *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"),
        "llm_int8_skip_modules",
    ),
    "bitsandbytes_8bit": ("llm_int8_threshold", "llm_int8_skip_modules"),
    "torchao": ("quant_type", "quant_type_kwargs", "modules_to_not_convert"),
    "quanto": ("weights_dtype", "modules_to_not_convert"),
    "gguf": ("file",),
}


@dataclass
class QuantizationSettings:
    """How the weights of frozen networks are compressed when the pipeline is loaded."""

    # Quantised base
    load_in_4bit: bool = field(
        default=False,
        metadata={
            "help": "Load the trained network and the large text encoders (all except CLIP's) in 4-bit precision with "
            "bitsandbytes, and train a LoRA on top. Requires a GPU."
        },
    )
    load_in_8bit: bool = field(
        default=False,
        metadata={
            "help": "Like load_in_4bit, but in 8-bit precision (LLM.int8), which rounds the inputs of the quantised "
            "layers to fp16. Requires a GPU."
        },
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = field(
        default="nf4", metadata={"help": "Data type of the weights with load_in_4bit: nf4 or fp4."}
    )
    use_bnb_nested_quant: bool = field(
        default=False,
        metadata={"help": "With load_in_4bit, also quantise the scales of the blocks (double quantisation)."},
    )
    bnb_4bit_quant_storage: str | None = field(
        default=None,
        metadata={
            "help": "With load_in_4bit, dtype in which the packed weights are stored, such as bfloat16; by default "
            "uint8."
        },
    )
    quantization: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Quantisation backend of diffusers or transformers for each component of the pipeline, for "
            "example {transformer: torchao, text_encoder_3: {backend: bitsandbytes_8bit}}. null leaves a component "
            "unquantised. docs/memory.md lists the backends and their options."
        },
    )


@dataclass(frozen=True)
class QuantizationSpec:
    """How one component is quantised."""

    backend: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "quantization"

    @property
    def package(self) -> str:
        """Import name of the backend's package."""
        return BACKENDS[self.backend]


def check_quantization(args: Any) -> None:
    """Refuse settings that contradict each other, and unknown backends."""
    if args.load_in_4bit and args.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both set; choose one of them.")
    for name, given in (args.quantization or {}).items():
        read_spec(name, given)
    _check_storage(args)
    if asks_for_quantization(args) and "quantization_config" in (args.model_init_kwargs or {}):
        raise ValueError(
            "model_init_kwargs: quantization_config is set together with load_in_4bit, load_in_8bit or quantization, "
            "which also make one; leave one of them out."
        )


def _check_storage(args: Any) -> None:
    """Refuse a storage dtype that an engine would cast to another one, which would change the weights."""
    own = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    storage = str(args.bnb_4bit_quant_storage).removeprefix("torch.")
    if args.bnb_4bit_quant_storage is not None and args.bf16 is not None and storage not in ("uint8", own):
        raise ValueError(
            f"bnb_4bit_quant_storage={storage!r} would be cast to {own}, the dtype of this run, which would change "
            f"the packed weights; set it to {own}, or leave it out."
        )


def asks_for_quantization(args: Any) -> bool:
    """Whether some component is to be quantised when the pipeline is loaded."""
    return bool(args.load_in_4bit or args.load_in_8bit or args.quantization)


def read_spec(component: str, given: Any) -> QuantizationSpec | None:
    """Read one entry of `quantization`; return None for None and for a configuration object of a library."""
    if given is None or hasattr(given, "quant_method"):
        return None
    if isinstance(given, str):
        given = {"backend": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("backend"), str):
        raise ValueError(
            f"quantization: {component} is {given!r}; write the name of a backend ({', '.join(BACKENDS)}) or a "
            "mapping with `backend` and its options."
        )
    backend, options = given["backend"], {name: value for name, value in given.items() if name != "backend"}
    if backend not in BACKENDS:
        raise ValueError(
            f"quantization: {component} names the backend {backend!r}; choose one of {', '.join(BACKENDS)}."
            f"{suggest(backend, BACKENDS)}"
        )
    unknown = [name for name in options if name not in OPTIONS[backend]]
    if unknown:
        raise ValueError(
            f"quantization: {component}: {backend} has no option {unknown[0]}; it has {', '.join(OPTIONS[backend])}."
        )
    if backend == "gguf" and not options.get("file"):
        raise ValueError(
            f"quantization: {component}: gguf reads weights from a file in which they are already quantised; give it "
            "as {backend: gguf, file: ...}."
        )
    return QuantizationSpec(backend, options)
