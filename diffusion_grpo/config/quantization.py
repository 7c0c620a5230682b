"""Settings of a quantised base model: a base of `DiffusionGRPOConfig`, and how they are read, without torch."""

import dataclasses
import importlib.util
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
PACKAGES = {"optimum.quanto": "optimum-quanto"}  # import name: name on PyPI, where they differ
# torchao types whose layers pass on gradients: rounded activations block them, and PEFT has no LoRA for int4
TORCHAO_TRAINABLE = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")


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
    """How one component is quantised.

    Attributes:
        backend: a key of `BACKENDS`.
        options: arguments of the backend's configuration class, under diffusers' names.
        source: the setting that asked for it, for messages.
    """

    backend: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "quantization"

    @property
    def package(self) -> str:
        """Import name of the backend's package."""
        return BACKENDS[self.backend]


def check_quantization(args: Any) -> None:
    """Refuse settings that contradict each other, unknown backends and packages that are not installed.

    Args:
        args: object with the attributes of `QuantizationSettings`.

    Raises:
        ValueError: in one sentence, what was found and what to change.
    """
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
    """Read one entry of `quantization`.

    Args:
        component: key of the entry.
        given: value of the entry: name of a backend; a mapping with `backend` and its options; a configuration object
            of diffusers or transformers; or None.

    Returns:
        the specification; None for a component that stays as it is, and for a configuration object, which is passed
        on as it is.

    Raises:
        ValueError: there is no such backend, or an option is unknown or missing.
    """
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
    _check_options(component, backend, options)
    return QuantizationSpec(backend, options)


def _check_options(component: str, backend: str, options: Mapping[str, Any]) -> None:
    int8 = ("llm_int8_threshold", "llm_int8_skip_modules")
    nf4 = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype")
    known = {
        "bitsandbytes_4bit": (*nf4, "llm_int8_skip_modules"),
        "bitsandbytes_8bit": int8,
        "torchao": ("quant_type", "quant_type_kwargs", "modules_to_not_convert"),
        "quanto": ("weights_dtype", "modules_to_not_convert"),
        "gguf": ("file",),
    }[backend]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"quantization: {component}: {backend} has no option {unknown[0]}; it has {', '.join(known)}."
        )
    if backend == "gguf" and not options.get("file"):
        raise ValueError(
            f"quantization: {component}: gguf reads weights from a file in which they are already quantised; give it "
            "as {backend: gguf, file: ...}."
        )
    weights = options.get("weights_dtype", "int8")
    if backend == "quanto" and weights not in ("int8", "int4", "int2", "float8"):
        raise ValueError(f"quantization: {component}: weights_dtype={weights!r}; choose int8, int4, int2 or float8.")


def choose_specs(args: Any, components: Mapping[str, tuple[str, str]], trained: tuple[str, ...]) -> dict[str, Any]:
    """Choose how each component is quantised, as far as settings ask for it.

    Args:
        args: object with the attributes of `QuantizationSettings`.
        components: library and class of each part of the pipeline, as in its `model_index.json`.
        trained: names of the trained networks.

    Returns:
        for each quantised component a `QuantizationSpec`, or the configuration object that the user gave.

    Raises:
        ValueError: `quantization` names a component that the pipeline lacks.
    """
    found: dict[str, Any] = {}
    short = "load_in_4bit" if args.load_in_4bit else "load_in_8bit" if args.load_in_8bit else None
    if short is not None:
        options = _read_bnb_options(args) if args.load_in_4bit else {}
        spec = QuantizationSpec(f"bitsandbytes_{short[-4:]}", options, short)
        large = [name for name, (library, kind) in components.items() if is_large_encoder(name, library, kind)]
        found = {name: spec for name in (*trained, *large) if name in components}
    networks = [name for name, (library, kind) in components.items() if _is_network(library, kind)]
    for name, given in (args.quantization or {}).items():
        if name not in networks:
            raise ValueError(
                f"quantization: the pipeline has no network {name!r}; it has {', '.join(networks)}."
                f"{suggest(name, networks)}"
            )
        found.pop(name, None)
        spec = given if hasattr(given, "quant_method") else read_spec(name, given)
        found |= {} if spec is None else {name: spec}
    return found


def _read_bnb_options(args: Any) -> dict[str, Any]:
    storage = {} if args.bnb_4bit_quant_storage is None else {"bnb_4bit_quant_storage": args.bnb_4bit_quant_storage}
    return {
        "bnb_4bit_quant_type": args.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": args.use_bnb_nested_quant,
        **storage,
    }


def is_large_encoder(name: str, library: str, kind: str) -> bool:
    """Whether a component is a text encoder worth quantising: a T5 or a language model, but not a CLIP."""
    return name.startswith("text_encoder") and library == "transformers" and not kind.startswith("CLIP")


def _is_network(library: str, kind: str) -> bool:
    return library in ("diffusers", "transformers") and not kind.endswith(
        ("Tokenizer", "TokenizerFast", "Scheduler", "Processor", "FeatureExtractor")
    )


def check_specs(specs: Mapping[str, Any], components: Mapping[str, tuple[str, str]], trained: tuple[str, ...]) -> None:
    """Refuse what the backends cannot do, and packages that are missing.

    Args:
        specs: what `choose_specs` returned.
        components, trained: as in `choose_specs`.

    Raises:
        ValueError: in one sentence, what to change.
        ImportError: the package of a backend is not installed.
    """
    for name, spec in specs.items():
        if not isinstance(spec, QuantizationSpec):
            continue
        if spec.backend == "gguf" and components[name][0] != "diffusers":
            raise ValueError(
                f"quantization: {name} is a network of transformers, which would decompress a gguf file while loading "
                "it; use torchao or bitsandbytes for it."
            )
        kind = spec.options.get("quant_type", TORCHAO_TRAINABLE[0])
        if spec.backend == "torchao" and name in trained and isinstance(kind, str) and kind not in TORCHAO_TRAINABLE:
            raise ValueError(
                f"quantization: {name} is trained, and a LoRA cannot be trained on torchao's {kind}; use one of "
                f"{', '.join(TORCHAO_TRAINABLE)}."
            )
        check_package(spec)


def check_package(spec: QuantizationSpec) -> None:
    """Refuse a backend whose package is not installed.

    Raises:
        ImportError: in one sentence, how to install the package.
    """
    package, _, part = spec.package.partition(".")
    if importlib.util.find_spec(package) is None or (part and importlib.util.find_spec(spec.package) is None):
        name = PACKAGES.get(spec.package, spec.package)
        raise ImportError(f"{spec.source}: {spec.backend} needs the package {name}: pip install {name}.")
