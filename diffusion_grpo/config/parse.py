"""Read a YAML file of settings and `--key value` overrides into dataclasses.

Keys are checked before torch is imported, and nothing of the model is loaded before all settings are. TRL's
`TrlParser` is not used: it reads files as YAML 1.1, suggests no key, and passes every default on as if it were chosen.
"""

import re
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..tiny import default_settings
from .arguments import LaunchArguments, LoraArguments, ScriptArguments
from .fields import FALSE, OF_TRANSFORMERS, REWARDS, TRUE, list_fields, own_fields, read_value, script_fields
from .files import expand_home, read_text
from .names import ALIASES, refuse_unknown

if TYPE_CHECKING:
    from .settings import DiffusionGRPOConfig


TEXT_TYPES = ("str", "str | None", "list[str]", "list[str] | None")


class Yaml12Loader(yaml.SafeLoader):
    """Read YAML 1.2, not 1.1 like PyYAML: `no` is a word, 1e-3 and 010 are numbers, and keys must not repeat."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Read a mapping."""
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
    "tag:yaml.org,2002:int",
    re.compile("^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$"),
    list("-+0123456789"),
)
Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_launch_arguments(config_file: str | None, overrides: list[str]) -> tuple[LaunchArguments, list[str]]:
    """Read the settings of processes from a YAML file and from `--key value` overrides, which win."""
    hints = list_fields(LaunchArguments)
    in_file = {key: value for key, value in (read_yaml(config_file) if config_file else {}).items() if key in hints}
    given = {key: value for key, value in read_overrides(overrides).items() if key in hints}
    read = {key: read_value(key, value, hints[key].type) for key, value in (in_file | given).items()}
    launch = LaunchArguments(**read)
    kept = [word for key, words in _group_by_key(overrides) if key not in hints for word in words]
    return launch, kept + [word for key in in_file for word in (f"--{key}", "null")]


def read_values(config_file: str | None, overrides: list[str]) -> dict[str, Any]:
    """Read a YAML file and `--key value` overrides, which win, without converting any value.

    In paths, `~` becomes the home folder.
    """
    values = read_yaml(config_file) if config_file else {}
    experiment = values.get("report_experiment")
    if isinstance(experiment, str):  # its path is relative to the file that names it
        values["report_experiment"] = str(Path(config_file).parent / experiment)
    values |= read_overrides(overrides)
    if str(values.get("fsdp")).lower() in (*TRUE, *FALSE):  # transformers would take words for its former options
        values["fsdp"] = True if str(values["fsdp"]).lower() in TRUE else None
    if values.get("model") == "tiny":
        values = default_settings(values) | values
    return values


def resolve_values(config_file: str | None, overrides: list[str]) -> dict[str, Any]:
    """Read a YAML file and overrides like [`read_values`], and convert values to the types of their settings."""
    from .settings import DiffusionGRPOConfig

    known, values = script_fields() | list_fields(DiffusionGRPOConfig), read_values(config_file, overrides)
    return {key: read_value(key, value, known[key].type) if key in known else value for key, value in values.items()}


def parse_train_arguments(
    config_file: str | None, overrides: list[str], config_class: "type[DiffusionGRPOConfig] | None" = None
) -> "tuple[ScriptArguments, LoraArguments, DiffusionGRPOConfig]":
    """Read a YAML file and `--key value` overrides, which win."""
    values = read_values(config_file, overrides)
    check_keys(values, config_class)
    from .settings import DiffusionGRPOConfig

    config_class = config_class or DiffusionGRPOConfig
    known = script_fields() | list_fields(config_class)
    values = {key: read_value(key, value, known[key].type) for key, value in values.items()}
    script, lora, _ = (
        cls(**{name: values.pop(name) for name in list_fields(cls) if name in values})
        for cls in (ScriptArguments, LoraArguments, LaunchArguments)
    )
    settings = config_class(**values)
    settings.given = frozenset(values)  # a class that inherits from ours does not note them
    return script, lora, settings


def check_keys(values: dict[str, Any], config_class: type | None = None) -> None:
    """Refuse settings that do not exist or are missing, without the seconds that importing torch takes."""
    own = [] if config_class is None else list_fields(config_class)
    refuse_unknown(values, [*own_fields(), *OF_TRANSFORMERS, *own])
    missing = [name for name, setting in list_fields(ScriptArguments).items() if setting.default is MISSING]
    if missing := [f"`{name}`" for name in missing if name not in values]:
        raise ValueError(f"the following arguments are required: {', '.join(missing)}.")


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
    for alias, name in ALIASES.items():
        if alias in values and name in values:
            raise ValueError(f"`{alias}` is another name of `{name}`; keep one of them.")
    return expand_home({ALIASES.get(key, key): value for key, value in values.items()})


def read_overrides(overrides: list[str]) -> dict[str, Any]:
    """Turn `["--beta", "0.1", "--names", "a", "b"]` into `{"beta": "0.1", "names": ["a", "b"]}`."""
    values = {}
    for key, (flag, *tokens) in _group_by_key(overrides):
        _, equals, value = flag.partition("=")
        values[key] = _read_override(key, [value, *tokens] if equals else tokens)
    return _rename_aliases(values)


def _group_by_key(overrides: list[str]) -> list[tuple[str, list[str]]]:
    """Return each key with its flag and the words after it, as written."""
    groups: list[tuple[str, list[str]]] = []
    for token in overrides:
        if token.startswith("--"):
            groups.append((token[2:].partition("=")[0].replace("-", "_"), [token]))
        elif not groups:
            raise ValueError(f"`{token}` does not belong to a key; write overrides as `--key value`.")
        else:
            groups[-1][1].append(token)
    return groups


def _read_override(key: str, tokens: list[str]) -> Any:
    if not tokens:
        return True
    if len(tokens) > 1:
        return tokens
    if tokens[0] == "null" or tokens[0].startswith(("{", "[")):
        try:
            return yaml.load(tokens[0], Yaml12Loader)
        except yaml.YAMLError as error:
            own = own_fields()
            if key in REWARDS or key not in OF_TRANSFORMERS and (key not in own or own[key].type not in TEXT_TYPES):
                raise ValueError(f"`{key}`: {tokens[0]} is not YAML: {' '.join(str(error).split())}") from error
    return tokens[0]
