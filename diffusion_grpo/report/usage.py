"""Write a model card's code, which loads the weights and makes a sample as in evaluations; recognise Hub names."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..policy.base import split_component
from ..weights.files import LORA_WEIGHTS

WIDEST = 119  # characters per line; a longer call gets a line per argument
LOCAL = "  # a folder on the machine that trained it"


@cache
def load_templates() -> jinja2.Environment:
    """Return the environment of the templates in this folder, which are compiled once."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )


def write_usage(run: dict[str, Any], source: str, prompt: str | None, is_on_hub: bool, is_whole: bool = True) -> str:
    """Return Python code that loads the weights and makes a sample; `usage.py.jinja` is its text."""
    settings, modular, is_full_training = run["settings"], run.get("modular"), run["trains_by"] == "full"
    is_saved_whole = is_full_training and is_whole
    dtype = run.get("dtype", "bfloat16" if settings.get("bf16") else "float16" if settings.get("fp16") else None)
    if dtype is None and run["model"] != "tiny" and not is_saved_whole:
        dtype = "float32"  # without it, text encoders are loaded as they were saved, often in half precision
    # by name, as the first parameter of many pipelines is not the prompt
    arguments = [f"prompt={_write(prompt or 'a prompt')}"] if "prompt" in run["evaluation_call"]["inputs"] else []
    inputs = [f"{name}=..." for name in run["evaluation_call"]["inputs"] if name != "prompt"]
    values, scales = dict(run["evaluation_call"]["arguments"]), {}
    if modular is not None:  # it gets its guidance scale from its guider, and is asked for its samples by their name
        scales = {part: _write(values.pop(name)) for name, part in modular["scales"].items() if name in values}
        values["output"] = modular["output"]
    template = load_templates().get_template("usage.py.jinja")
    code = template.render(
        run=run,
        kind="DiffusionPipeline" if modular is None else "ModularPipeline",
        how=f"dtype=torch.{dtype}" if dtype else "",
        is_full_training=is_full_training,
        is_saved_whole=is_saved_whole,
        source=json.dumps(source),
        base=json.dumps(source) if is_saved_whole else _find_base(run),
        note="" if is_saved_whole or run["model"] == "tiny" or names_hub_model(run["model"]) else LOCAL,
        networks=_find_networks(run, source, is_on_hub),
        lora_weights=LORA_WEIGHTS,
        scheduler=_write_arguments(settings.get("scheduler_kwargs") or {}),
        scales=scales,
        arguments=[*arguments, *inputs, *_write_arguments(values)],
        has_inputs=bool(inputs),
        item="[0][0]" if modular is None else "[0]",
        widest=WIDEST,
    )
    return code.rstrip()


def _find_base(run: dict[str, Any]) -> str | None:
    """Return the arguments that load the base model; None for a pipeline built in memory, which has no name."""
    if run["model"] == run["pipeline"]:
        return None
    chosen = run["settings"].get("model_init_kwargs") or {}
    version = {name: chosen[name] for name in ("revision", "variant") if chosen.get(name)}
    # the embedded model has no name on the Hub
    return ", ".join(["tiny.PATH" if run["model"] == "tiny" else json.dumps(run["model"]), *_write_arguments(version)])


def _find_networks(run: dict[str, Any], source: str, is_on_hub: bool) -> dict[str, str]:
    """Return the trained networks, and the arguments that say where the LoRA of each is."""
    first, *others = split_component(run["component"])
    places = {first: json.dumps(source)}
    for name in others:
        places[name] = f'{json.dumps(source)}, subfolder="{name}"' if is_on_hub else json.dumps(f"{source}/{name}")
    return places


def _write_arguments(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_write(value)}" for name, value in values.items()]


def _write(value: Any) -> str:
    """Return a value as Python code, texts in double quotes where they contain none."""
    is_plain = isinstance(value, str) and '"' not in value
    return json.dumps(value, ensure_ascii=False) if is_plain else repr(value)


def is_repo_id(name: str) -> bool:
    """Return whether a name is valid for a repository on the Hub, and is not an existing local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def names_hub_model(model: str) -> bool:
    """Return whether a base model's name is an id on the Hub, `owner/name`."""
    return model.count("/") == 1 and is_repo_id(model)
