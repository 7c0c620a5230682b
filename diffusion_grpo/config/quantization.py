"""Settings of a quantised base model: a base class of `DiffusionGRPOConfig`, and how they are read, without torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .declare import setting
from .names import suggest

BACKENDS = ("bitsandbytes_4bit", "bitsandbytes_8bit", "torchao", "gguf", "quanto")  # diffusers' names


@dataclass
class QuantizationSettings:
    """How the weights of frozen networks are compressed when the pipeline is loaded."""

    # Quantised base
    load_in_4bit: bool = setting(
        False,
        "Load the trained network and the large text encoders (not CLIP's) in 4-bit precision with bitsandbytes, and "
        "train a LoRA on top. Requires a GPU.",
    )
    load_in_8bit: bool = setting(
        False,
        "Like load_in_4bit, but in 8-bit precision (LLM.int8). Requires a GPU.",
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = setting(
        "nf4", "Data type of the weights with load_in_4bit: nf4 or fp4."
    )
    use_bnb_nested_quant: bool = setting(False, "With load_in_4bit, also quantise the scales of the blocks.")
    bnb_4bit_quant_storage: str | None = setting(
        None, "With load_in_4bit, dtype in which the weights are stored, such as bfloat16; by default uint8."
    )
    quantization: dict[str, Any] | str | None = setting(
        None,
        "Quantisation backend for each component of the pipeline, such as {transformer: torchao, text_encoder_3: "
        "{backend: bitsandbytes_8bit}}. null leaves a component unquantised. docs/memory.md lists the backends and "
        "their options.",
    )


@dataclass(frozen=True)
class QuantizationSpec:
    backend: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_quantization(args: Any) -> None:
    """Refuse settings that contradict each other, and unknown backends."""
    if args.load_in_4bit and args.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both set; choose one of them.")
    for name, given in (args.quantization or {}).items():
        read_spec(name, given)
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    storage = str(args.bnb_4bit_quant_storage).removeprefix("torch.")
    if args.bnb_4bit_quant_storage is not None and args.bf16 is not None and storage not in ("uint8", dtype):
        raise ValueError(
            f"bnb_4bit_quant_storage={storage!r} would be cast to {dtype}, the dtype of this run, which would change "
            f"the packed weights; set it to {dtype}, or leave it out."
        )


def asks_for_quantization(args: Any) -> bool:
    return bool(args.load_in_4bit or args.load_in_8bit or args.quantization)


def read_spec(component: str, given: Any) -> QuantizationSpec | None:
    """Read one entry of `quantization`; return None for None and for a configuration object of a library."""
    if given is None or hasattr(given, "quant_method"):
        return None
    if isinstance(given, str):
        given = {"backend": given}
    backend = given.get("backend") if isinstance(given, Mapping) else None
    if backend not in BACKENDS:
        raise ValueError(
            f"quantization: {component} is {given!r}; write the name of a backend ({', '.join(BACKENDS)}), or a "
            f"mapping with `backend` and its options.{suggest(backend, BACKENDS)}"
        )
    if backend == "gguf" and not given.get("file"):
        raise ValueError(
            f"quantization: {component}: gguf reads weights from a file; write {{backend: gguf, file: ...}}."
        )
    return QuantizationSpec(backend, {name: value for name, value in given.items() if name != "backend"})
