"""Read a YAML file of settings and `--key value` overrides, once, into dataclasses.

Keys are checked before torch is imported. TRL's `TrlParser` is not used: it reads files as YAML 1.1, suggests no key,
and passes every default on as if it were chosen.
"""

import re
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from ..tiny import default_settings
from .arguments import LaunchArguments, LoraArguments, ScriptArguments
from .fields import (
    FALSE,
    OF_TRANSFORMERS,
    TRUE,
    Setting,
    check_fields,
    list_fields,
    own_fields,
    read_value,
    script_fields,
)
from .files import expand_home, read_text
from .names import ALIASES, refuse_unknown

if TYPE_CHECKING:
    from .settings import DiffusionGRPOConfig

Arguments = TypeVar("Arguments", ScriptArguments, LoraArguments, LaunchArguments)


class Yaml12Loader(yaml.SafeLoader):
    """Read YAML 1.2, not 1.1 like PyYAML: `no` is a word, 1e-3 and 010 are numbers, and keys must not repeat."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise yaml.YAMLError(
                    f"the key {key.value!r} in line {line} is already in line {lines[name]}; keep one of them"
                )
            lines[name] = line
        return node


Yaml12Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|false|False)$"), list("tTfF"))
Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$"), list("-+0123456789")
)
Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_values(config_file: str | None, overrides: list[str]) -> dict[str, Any]:
    """Read a YAML file and `--key value` overrides, which win; refuse settings that do not exist or are missing."""
    values = read_yaml(config_file) if config_file else {}
    experiment = values.get("report_experiment")
    if isinstance(experiment, str):  # its path is relative to the file that names it
        values["report_experiment"] = str(Path(config_file).parent / experiment)
    values |= read_overrides(overrides)
    known = own_fields()
    refuse_unknown(values, [*known, *OF_TRANSFORMERS])
    missing = [name for name, setting in list_fields(ScriptArguments).items() if setting.default is MISSING]
    if missing := [f"`{name}`" for name in missing if name not in values]:
        raise ValueError(f"the following arguments are required: {', '.join(missing)}.")
    if str(values.get("fsdp")).lower() in (*TRUE, *FALSE):  # transformers would take words for its former options
        values["fsdp"] = True if str(values["fsdp"]).lower() in TRUE else None
    if values["model"] == "tiny":
        values = default_settings(values) | values
    return _convert(values, known)


def _convert(values: dict[str, Any], known: dict[str, Setting]) -> dict[str, Any]:
    return {name: read_value(value, known[name]) if name in known else value for name, value in values.items()}


def make_script_arguments(values: dict[str, Any], kind: type[Arguments]) -> Arguments:
    """Make `ScriptArguments`, `LoraArguments` or `LaunchArguments` of the values that [`read_values`] returned."""
    made = kind(**{name: values[name] for name in list_fields(kind) if name in values})
    check_fields(made)
    return made


def resolve_values(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the words among values that [`read_values`] returned to the types of transformers' settings, too."""
    from .settings import DiffusionGRPOConfig

    return _convert(values, list_fields(DiffusionGRPOConfig))


def make_settings(
    values: dict[str, Any], config_class: "type[DiffusionGRPOConfig] | None" = None
) -> "DiffusionGRPOConfig":
    from .settings import DiffusionGRPOConfig

    others = script_fields()
    values = {name: value for name, value in values.items() if name not in others}
    return (config_class or DiffusionGRPOConfig)(**values)


def parse_train_arguments(
    config_file: str | None, overrides: list[str], config_class: "type[DiffusionGRPOConfig] | None" = None
) -> "tuple[ScriptArguments, LoraArguments, DiffusionGRPOConfig]":
    """Read a YAML file and `--key value` overrides, which win."""
    values = resolve_values(read_values(config_file, overrides))
    script, lora = (make_script_arguments(values, kind) for kind in (ScriptArguments, LoraArguments))
    return script, lora, make_settings(values, config_class)


def read_yaml(config_file: str) -> dict[str, Any]:
    """Return the mapping in a YAML file; raise ValueError if the file is missing or holds something else."""
    path = Path(config_file)
    if path.is_dir():
        raise ValueError(f"{config_file} is a folder; give the path of a YAML file.")
    if not path.is_file():
        raise ValueError(f"there is no file {config_file}.")
    try:
        values = yaml.load(read_text(path), Yaml12Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{config_file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{config_file} holds {type(values).__name__}, expected lines of the form `key: value`.")
    return _rename_aliases({str(key): value for key, value in values.items()})


def _rename_aliases(values: dict[str, Any]) -> dict[str, Any]:
    return expand_home({ALIASES.get(key, key): value for key, value in values.items()})


def read_overrides(overrides: list[str]) -> dict[str, Any]:
    """Turn `["--beta", "0.1", "--names", "a", "b"]` into `{"beta": "0.1", "names": ["a", "b"]}`."""
    groups: dict[str, list[str]] = {}
    key = None
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            groups[key] = [value] if equals else []
        elif key is None:
            raise ValueError(f"`{word}` does not belong to a key; write overrides as `--key value`.")
        else:
            groups[key].append(word)
    return _rename_aliases({key: _read_words(words) for key, words in groups.items()})


def _read_words(words: list[str]) -> Any:
    if len(words) != 1:
        return words or True
    if words[0] == "null" or words[0].startswith(("{", "[")):
        try:
            return yaml.load(words[0], Yaml12Loader)
        except yaml.YAMLError:
            return words[0]  # a text that starts with a bracket
    return words[0]
