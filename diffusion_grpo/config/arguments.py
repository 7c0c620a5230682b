"""
What `diffusion-grpo train` reads: a YAML file and overrides go in, three dataclasses come out.

A module of its own because everything here happens before a model, a dataset or torch's training code is used, and
because it is the one place that turns a mistyped key into a sentence with the nearest known key.
"""

import difflib
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

from ..tiny import default_settings

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import HfArgumentParser

    from .settings import DiffusionGRPOConfig


@dataclass
class ScriptArguments:
    """What is trained, on which prompts, by which rewards."""

    model: str = field(metadata={"help": "Hub id or folder of a diffusers pipeline, or `tiny`, the embedded model."})
    dataset: str = field(
        metadata={
            "help": "Prompts: a .txt (one a line), .jsonl, .json, .csv or .parquet file, a folder written by "
            "`save_to_disk`, a Hub id, or `tiny`."
        }
    )
    reward_funcs: list[str] = field(
        metadata={
            "help": "Rewards: built-in names or dotted paths of functions, `my_module.my_reward`; or a mapping from "
            "these to weights or options, `{text: 0.6, color: {weight: 0.4}}` (docs/rewards.md)."
        }
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Held-out prompts, given as `dataset` is; nothing is evaluated without them."}
    )
    dataset_test_split: str = field(default="test", metadata={"help": "Split of `eval_dataset` to evaluate on."})
    eval_max_prompts: int | None = field(
        default=None, metadata={"help": "Evaluate on the first so many held-out prompts."}
    )
    eval_reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Judges: rewards that are measured in evaluations and never trained on; as `reward_funcs`."},
    )
    baseline_guidance_scales: list[float] | None = field(
        default=None,
        metadata={
            "help": "Guidance scales at which the untrained model is evaluated first, as lines to compare with."
        },
    )
    report_experiment: str | None = field(
        default=None,
        metadata={
            "help": "JSON of an earlier experiment to show in the report (docs/metrics.md); in a file of settings "
            "relative to that file."
        },
    )

    def __post_init__(self):
        if self.eval_max_prompts is not None and self.eval_max_prompts < 1:
            raise ValueError(f"eval_max_prompts is {self.eval_max_prompts}; use at least 1, or leave it out for all.")
        if self.baseline_guidance_scales and self.eval_dataset is None:
            raise ValueError("baseline_guidance_scales needs held-out prompts to be measured on: set eval_dataset.")
        if self.report_experiment is not None and not Path(self.report_experiment).is_file():
            raise ValueError(f"report_experiment: there is no file {self.report_experiment}.")


LORA_INITS = {"kaiming": True, "gaussian": "gaussian"}  # PEFT's init_lora_weights


@dataclass
class LoraArguments:
    """LoRA under TRL's names; without `use_peft` every weight of the policy is trained."""

    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA in place of all weights."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the LoRA: its output is multiplied by alpha / r."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Layers that get a LoRA, by the end of their names; one entry alone may be a regular expression "
            "or `all-linear`. Without it: to_q, to_k, to_v, to_out.0, or of a language model q_proj, k_proj, v_proj, "
            "o_proj."
        },
    )
    lora_init: str = field(
        default="kaiming",
        metadata={
            "help": "How a LoRA's first factor starts: kaiming (PEFT's own) or gaussian, with the standard deviation "
            "1 / lora_r (Flow-GRPO). The second one starts at 0."
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Must be 0: dropout makes the replay inexact."})

    def __post_init__(self):
        if self.lora_dropout != 0:
            raise ValueError(
                f"lora_dropout is {self.lora_dropout}; set it to 0, because dropout draws a different network in "
                "rollout and in replay and moves the ratio by more than the clip range."
            )
        if self.lora_init not in LORA_INITS:
            raise ValueError(f"lora_init is {self.lora_init!r}; choose one of {', '.join(LORA_INITS)}.")
        if self.lora_r < 1:
            raise ValueError(f"lora_r is {self.lora_r}; use at least 1.")

    def peft_config(self, lora_path: str | None = None) -> "LoraConfig | None":
        """Describe a new LoRA by these arguments; None for full training, and where `lora_path` is trained further.

        Raises:
            ValueError: both a LoRA to train further and settings of a new one.
        """
        if lora_path is not None:
            others = [f.name for f in fields(self) if f.name != "use_peft" and getattr(self, f.name) != f.default]
            if others:
                raise ValueError(f"lora_path names a LoRA that has its own rank and layers; leave out {others[0]}.")
            return None
        if not self.use_peft:
            return None
        from peft import LoraConfig

        modules = self.lora_target_modules
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=0.0,
            init_lora_weights=LORA_INITS[self.lora_init],
            target_modules=modules[0] if modules and len(modules) == 1 else modules,
        )


@dataclass
class LaunchArguments:
    """How many processes are started and what they share, in accelerate's names. Without any, none is started."""

    accelerate_config: str | None = field(
        default=None,
        metadata={
            "help": "single_gpu, multi_gpu, multi_node, zero1, zero2, zero3, zero3_offload or fsdp2 "
            "(docs/distributed.md), or a file written by `accelerate config`."
        },
    )
    num_processes: int | None = field(
        default=None,
        metadata={"help": "Processes, of all machines together; by default one for each accelerator."},
    )
    num_machines: int | None = field(default=None, metadata={"help": "Machines; the same command runs on each."})
    machine_rank: int | None = field(default=None, metadata={"help": "Which of the machines this is, from 0."})
    main_process_ip: str | None = field(default=None, metadata={"help": "Address of the machine of rank 0."})
    main_process_port: int | None = field(
        default=None,
        metadata={"help": "Port on that machine; by default a free one if there is one machine."},
    )

    def __post_init__(self):
        for name in ("num_processes", "num_machines"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; use at least 1.")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be started."""
        return all(value is None for value in vars(self).values())


RENAMED = {"warmup_ratio": "write it as `warmup_steps`, below 1 a share of all updates"}


class Yaml12Loader(yaml.SafeLoader):
    """YAML 1.2's scalars in place of PyYAML's 1.1: `no` is a word (eval_strategy: no) and 1e-3 a number."""


Yaml12Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|false|False)$"), list("tTfF"))
Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)


def parse_launch_arguments(config_file: str | None, overrides: list[str]) -> tuple[LaunchArguments, list[str]]:
    """
    What a YAML file and `--key value` overrides, which win, say of processes.

    Returns:
        it, and the overrides for each process: without these, and with `null` for those in the file.

    Raises:
        ValueError: a value of the wrong type.
    """
    from .early_checks import read_value, type_name

    hints = get_type_hints(LaunchArguments)
    in_file = {key: value for key, value in (read_yaml(config_file) if config_file else {}).items() if key in hints}
    given = {key: value for key, value in read_overrides(overrides).items() if key in hints}
    read = {key: read_value(key, value, type_name(hints[key])) for key, value in (in_file | given).items()}
    launch = LaunchArguments(**read)
    kept = [word for key, words in _grouped(overrides) if key not in hints for word in words]
    return launch, kept + [word for key in in_file for word in (f"--{key}", "null")]


def read_values(config_file: str | None, overrides: list[str]) -> dict[str, Any]:
    """Read the settings of a YAML file and of `--key value` overrides, which win, as they are written.

    Raises:
        ValueError: the file is missing or is not a mapping, or a word stands alone.
    """
    values = read_yaml(config_file) if config_file else {}
    experiment = values.get("report_experiment")
    if isinstance(experiment, str):  # it lies beside the file that names it
        values["report_experiment"] = str(Path(config_file).parent / experiment)
    values |= read_overrides(overrides)
    if values.get("model") == "tiny":
        values = default_settings(values) | values
    return values


def parse_train_arguments(
    config_file: str | None, overrides: list[str], config_class: "type[DiffusionGRPOConfig] | None" = None
) -> "tuple[ScriptArguments, LoraArguments, DiffusionGRPOConfig]":
    """
    Reads a YAML file and `--key value` overrides, which win.

    Args:
        config_file: the file, or None.
        overrides: as words.
        config_class: in place of `DiffusionGRPOConfig`, a class that inherits from it.

    Raises:
        ValueError: an unknown key (with the nearest known one), a value of the wrong type, a missing key, or settings
            that contradict each other.
    """
    from .early_checks import check_values, processes_here, type_name
    from .source import Setting

    values = read_values(config_file, overrides)
    own = {} if config_class is None else {f.name: Setting(type_name(f.type), f.default) for f in fields(config_class)}
    world_size = getattr(config_class, "world_size", None)
    check_values(values, world_size if isinstance(world_size, int) else processes_here(), own)

    from transformers import HfArgumentParser

    from .settings import DiffusionGRPOConfig

    classes = [ScriptArguments, LoraArguments, config_class or DiffusionGRPOConfig]
    values = {key: value for key, value in values.items() if key not in LaunchArguments.__dataclass_fields__}
    parser = HfArgumentParser(classes, allow_abbrev=False)
    parser.error = _raise_argparse_error
    return parser.parse_args_into_dataclasses(_as_flags(values, parser), look_for_args_file=False)


def _as_flags(values: dict[str, Any], parser: "HfArgumentParser") -> list[str]:
    """Flags where argparse can check the type; defaults where it has no spelling for the value (null, dicts)."""
    actions = {action.dest: action for action in parser._actions}
    flags = []
    for key, value in values.items():
        if key in ("reward_funcs", "eval_reward_funcs") and _holds_mapping(value):
            actions[key].required = False
            parser.set_defaults(**{key: value})  # `load_rewards` checks it
            continue
        if not value and isinstance(value, (type(None), list)) or isinstance(value, dict):
            actions[key].required = False
            parser.set_defaults(**{key: value})
        elif isinstance(value, list) and actions[key].nargs != "+":
            parser.set_defaults(**{key: value})
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)]
        else:
            flags.append(f"--{key}={value}")
    return flags


def _holds_mapping(value: Any) -> bool:
    return isinstance(value, dict) or isinstance(value, list) and any(not isinstance(entry, str) for entry in value)


def _raise_argparse_error(message: str) -> None:
    names = re.sub(r"(?:argument )?--(\w+)(?:/--[\w-]+)*", r"`\1`", message)
    raise ValueError(f"{names}.")


def read_yaml(config_file: str) -> dict[str, Any]:
    """The mapping in a YAML file; ValueError where the file is missing or holds something else."""
    path = Path(config_file)
    if not path.is_file():
        raise ValueError(f"there is no file {config_file}.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Yaml12Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{config_file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{config_file} holds {type(values).__name__}, expected lines of the form `key: value`.")
    return {str(key): value for key, value in values.items()}


def read_overrides(overrides: list[str]) -> dict[str, Any]:
    """`["--beta", "0.1", "--names", "a", "b"]` -> `{"beta": "0.1", "names": ["a", "b"]}`; null, {}, [] are YAML."""
    values = {}
    for key, (flag, *tokens) in _grouped(overrides):
        _, equals, value = flag.partition("=")
        values[key] = _override_value([value, *tokens] if equals else tokens)
    return values


def _grouped(overrides: list[str]) -> list[tuple[str, list[str]]]:
    """Each key with its flag and the words after it, as they were written."""
    groups: list[tuple[str, list[str]]] = []
    for token in overrides:
        if token.startswith("--"):
            groups.append((token[2:].partition("=")[0].replace("-", "_"), [token]))
        elif not groups:
            raise ValueError(f"`{token}` stands alone; overrides are written `--key value`.")
        else:
            groups[-1][1].append(token)
    return groups


def _override_value(tokens: list[str]) -> Any:
    if not tokens:
        return True
    if len(tokens) > 1:
        return tokens
    if tokens[0] == "null" or tokens[0].startswith(("{", "[")):
        return yaml.load(tokens[0], Yaml12Loader)
    return tokens[0]


def refuse_unknown(values: dict[str, Any], known: list[str]) -> None:
    """Raises ValueError for the first key that is not known, with the nearest known one."""
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown setting `{key}`; {RENAMED.get(key, f'the nearest known one is `{nearest}`')}.")
