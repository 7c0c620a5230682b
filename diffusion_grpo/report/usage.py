"""Write the code on a model card, which loads the weights and makes a sample as in the run's evaluations."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..policy.base import split_component
from ..weights.files import LORA_WEIGHTS

WIDEST = 119  # characters per line; a longer call gets a line per argument


def write_usage(run: dict[str, Any], source: str, prompt: str | None, is_on_hub: bool, is_whole: bool = True) -> str:
    """Return Python code that loads the weights and makes a sample."""
    is_full_training, is_embedded = run["trains_by"] == "full", run["model"] == "tiny"
    dtype = _find_half(run)
    if dtype is None and not is_embedded and not (is_full_training and is_whole):
        dtype = "float32"  # without it, text encoders are loaded as they were saved, often in half precision
    lines = ["import torch"] if dtype else []
    kind = "ModularPipeline" if "modular" in run else "DiffusionPipeline"
    lines += [f"from diffusers import {kind}"]
    how = f", dtype=torch.{dtype}" if dtype else ""
    if is_full_training and is_whole:
        lines += ["", *_load(kind, json.dumps(source), how)]
    else:
        lines += _load_base(run, how)
        lines += _load_networks(run, source, how) if is_full_training else _load_lora(run, source, is_on_hub)
        lines += _set_scheduler(run["settings"].get("scheduler_kwargs"))
    return "\n".join([*lines, *_call(run.get("evaluation_call"), prompt, run.get("modular"))])


def _load(kind: str, source: str, how: str) -> list[str]:
    """Return the lines that load a whole pipeline; a modular one loads its components in a second step."""
    if kind != "ModularPipeline":
        return [f"pipe = {kind}.from_pretrained({source}{how})"]
    return [f"pipe = {kind}.from_pretrained({source})", f"pipe.load_components({how.removeprefix(', ')})"]


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


def _load_base(run: dict[str, Any], how: str) -> list[str]:
    """Return the lines that load the base model, after the imports that they need."""
    is_embedded = run["model"] == "tiny"  # it has no name on the Hub
    base = "tiny.PATH" if is_embedded else json.dumps(run["model"])
    lines = ["from diffusion_grpo import tiny"] if is_embedded else []
    lines += ["from peft import PeftModel"] if run.get("loads_by") == "peft" else []
    if run["model"] == run.get("pipeline"):  # a pipeline that was built in memory has no other name
        return [*lines, "", "pipe = ...  # the pipeline that was trained"]
    is_local = not is_embedded and not names_hub_model(run["model"])
    note = "  # a folder on the machine that trained it" if is_local else ""
    given = run["settings"].get("model_init_kwargs") or {}
    which = "".join(f", {name}={_write(given[name])}" for name in ("revision", "variant") if given.get(name))
    first, *more = _load("ModularPipeline" if "modular" in run else "DiffusionPipeline", f"{base}{which}", how)
    return [*lines, "", first + note, *more]


def _load_networks(run: dict[str, Any], source: str, how: str) -> list[str]:
    """Return a line for each network that was trained in full."""
    return [
        f'pipe.{name} = pipe.{name}.from_pretrained({json.dumps(source)}, subfolder="{name}"{how})'
        for name in split_component(run["component"])
    ]


def _load_lora(run: dict[str, Any], source: str, is_on_hub: bool) -> list[str]:
    """Return a line for the LoRA of each trained network."""
    way, lines = run.get("loads_by", "load_lora_weights"), []
    names = split_component(run["component"])
    for name in names:
        into = f", load_into_{name}=True" if name.endswith("_2") else ""  # the second of two experts
        place = json.dumps(source)
        if name != names[0]:
            place = f'{place}, subfolder="{name}"' if is_on_hub else json.dumps(f"{source}/{name}")
        if way == "load_lora_weights":
            lines.append(f"pipe.load_lora_weights({place}{into})")
        elif way == "load_lora_adapter":
            arguments = f'{place}, prefix=None, weight_name="{LORA_WEIGHTS}"'
            lines.append(f"pipe.{name}.load_lora_adapter({arguments})")
        else:
            lines.append(f"PeftModel.from_pretrained(pipe.{name}, {place})  # changes the pipeline itself")
    return lines


def _set_scheduler(settings: dict[str, Any] | None) -> list[str]:
    """Return the line that applies the run's scheduler settings to the base model; none without such settings."""
    if not settings:
        return []
    changes = ", ".join(f"{name}={_write(value)}" for name, value in settings.items())
    return [f"pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config, {changes})  # as in training"]


def _call(call: dict[str, Any] | None, prompt: str | None, modular: dict[str, Any] | None) -> list[str]:
    """Return the lines that make a sample; none for a run of a version that did not record the call.

    A modular pipeline gets its guidance scale from its guider, and is asked for its samples by their name. Inputs that
    only a dataset has, such as images to edit, are written as `...`.
    """
    if call is None:
        return []
    # by name: the first parameter of many pipelines is another one, such as the image
    first = [f"prompt={_write(prompt or 'a prompt')}"] if "prompt" in call["inputs"] else []
    own = [f"{name}=..." for name in call["inputs"] if name != "prompt"]
    fixed, item, lines = dict(call["arguments"]), "[0][0]", [""]
    if modular is not None:
        scales = {part: fixed.pop(name) for name, part in modular["scales"].items() if name in fixed}
        lines += [
            f"pipe.update_components({part}=pipe.{part}.new(guidance_scale={_write(value)}))"
            for part, value in scales.items()
        ]
        fixed, item = fixed | {"output": modular["output"]}, "[0]"
    arguments = [*first, *own, *(f"{name}={_write(value)}" for name, value in fixed.items())]
    note = "# as in the evaluations" + ("; put your own inputs in place of ..." if own else "")
    line = f"sample = pipe({', '.join(arguments)}){item}"
    if len(line) > WIDEST:
        line = "\n".join(["sample = pipe(", *(f"    {argument}," for argument in arguments), f"){item}"])
    return [*lines, note, line]


def _write(value: Any) -> str:
    """Return a value as Python code, texts in double quotes where they contain none."""
    is_plain = isinstance(value, str) and '"' not in value
    return json.dumps(value, ensure_ascii=False) if is_plain else repr(value)


def _find_half(run: dict[str, Any]) -> str | None:
    """Return the half-precision dtype in which to load the pipeline; None if it was float32."""
    settings = run["settings"]
    given = "bfloat16" if settings.get("bf16") else "float16" if settings.get("fp16") else None
    return run.get("dtype", given)
