"""Weights on disk and on the Hub: what is written here, plain diffusers loads.

In: the trained model and its pipeline. Out: a folder with LoRA weights in both PEFT's and diffusers' form, or with the
network (and, for the final save, the whole pipeline) as diffusers lays it out; and a model card.
"""

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

ADAPTER_WEIGHTS = "adapter_model.safetensors"
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"


def save_policy(
    model: nn.Module, pipe: DiffusionPipeline, component: str, folder: str | Path, whole_pipeline: bool = False
) -> None:
    """Writes the trained weights to `folder`.

    Args:
        model: the trained model, unwrapped: a `PeftModel` around the pipeline's network, or that network.
        pipe: the pipeline it belongs to.
        component: the network's name in the pipeline.
        folder: made if needed. LoRA: `pytorch_lora_weights.safetensors` for `pipe.load_lora_weights(folder)`, and
            PEFT's `adapter_model.safetensors`. Full training: `folder/<component>`.
        whole_pipeline: for full training, write the other parts too, for `DiffusionPipeline.from_pretrained(folder)`.

    Of several networks that share the steps out, the LoRA of the first goes to `folder` and that of any other to
    `folder/<component>`: `pipe.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)`.
    """
    folder = Path(folder)
    for part, name, place in _others(model, component, folder):
        save_policy(part, pipe, name, place)
    model, component = _first(model, component)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        _save_lora(model, pipe, component, folder)
    elif whole_pipeline:
        pipe.save_pretrained(folder)
    else:
        model.save_pretrained(folder / component)


def _first(model: nn.Module, component: str) -> tuple[nn.Module, str]:
    """The model itself, or the first of several."""
    names = component.split(", ")
    return (model[names[0]] if isinstance(model, nn.ModuleDict) else model), names[0]


def _others(model: nn.Module, component: str, folder: Path) -> Iterator[tuple[nn.Module, str, Path]]:
    """The models beside the first, their names, and where their weights lie."""
    for name in component.split(", ")[1:]:
        yield model[name], name, folder / name if isinstance(model[name], PeftModel) else folder


def _save_lora(model: PeftModel, pipe: DiffusionPipeline, component: str, folder: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = model.peft_config[model.active_adapter]
    config.save_pretrained(folder)
    known = inspect.signature(getattr(pipe, "save_lora_weights", lambda: None)).parameters
    component = component.removesuffix("_2")  # diffusers writes a second expert's LoRA as it does the first's
    if f"{component}_lora_layers" not in known:  # no LoRA loader for this network: PEFT's files alone
        return
    layers = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    if component == "unet":
        layers = convert_state_dict_to_diffusers(layers)
    names = {f"{component}_lora_layers": layers, f"{component}_lora_adapter_metadata": config.to_dict()}
    pipe.save_lora_weights(folder, **{name: value for name, value in names.items() if name in known})


def load_policy(model: nn.Module, component: str, folder: str | Path) -> None:
    """Puts what `save_policy` wrote back into the model, in place and bit for bit.

    Raises:
        ValueError: the folder holds no weights of this kind of model.
    """
    folder = Path(folder)
    for part, name, place in _others(model, component, folder):
        load_policy(part, name, place)
    model, component = _first(model, component)
    if isinstance(model, PeftModel):
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}; it was not written by LoRA training.")
        result = set_peft_model_state_dict(model, load_file(folder / ADAPTER_WEIGHTS))
        if result.unexpected_keys:
            raise ValueError(
                f"The adapter in {folder} has layers that this model lacks, such as {result.unexpected_keys[0]}; use "
                "the peft_config it was trained with."
            )
        return
    if not (folder / component).is_dir():
        raise ValueError(f"{folder} has no folder {component!r}; it was not written by full training of that network.")
    saved = type(model).from_pretrained(folder / component, torch_dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


def copy_weights(checkpoint: str | Path, folder: str | Path, component: str) -> None:
    """Copies what `save_policy` wrote into a checkpoint, and nothing of the training state, to another folder."""
    checkpoint, folder = Path(checkpoint), Path(folder)
    for name in (ADAPTER_WEIGHTS, "adapter_config.json", LORA_WEIGHTS):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, folder / name)
    for name in (*component.split(", "), "ema"):
        if (checkpoint / name).is_dir():
            shutil.copytree(checkpoint / name, folder / name, dirs_exist_ok=True)


def write_model_card(folder: str | Path, run: dict[str, Any], history: list[dict[str, Any]], name: str | None) -> None:
    """Writes `README.md` with base model, rewards, settings, curve and sample pictures.

    Args:
        folder: the run's output folder; pictures in it are shown.
        run: contents of `run.json`.
        history: the trainer's `log_history`.
        name: title; by default the folder's name.
    """
    folder = Path(folder)
    lora = run["trains_by"] != "full"
    data = ModelCardData(
        library_name="diffusers",
        **_base_model(run["model"], lora),
        tags=["diffusion-grpo", "grpo", "reinforcement-learning", *(["lora"] if lora else [])],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name or folder.resolve().name}",
        f"{run['pipeline']} `{run['model']}`, its {run['component']} trained with GRPO by diffusion-grpo "
        f"({run['trains_by']}).",
        "## Use",
        f"```python\n{_usage(run, folder, lora)}\n```",
        "## Rewards",
        _reward_table(run, history),
        *[f"![{title}]({file})" for title, file in _pictures(folder)],
        "## Settings",
        f"```json\n{json.dumps(run['settings'], indent=2)}\n```",
        f"Versions: {', '.join(f'{package} {version}' for package, version in run['versions'].items())}.",
        "The method: [Flow-GRPO](https://huggingface.co/papers/2505.05470), "
        "[DDPO](https://huggingface.co/papers/2305.13301).",
    ]
    ModelCard("\n\n".join(parts)).save(folder / "README.md")


def _base_model(model: str, lora: bool) -> dict[str, str]:
    """The Hub's link to the base model, for models that came from the Hub."""
    if model.count("/") != 1 or Path(model).exists():
        return {}
    return {"base_model": model, "base_model_relation": "adapter" if lora else "finetune"}


def _usage(run: dict[str, Any], folder: Path, lora: bool) -> str:
    is_embedded = lora and run["model"] == "tiny"  # it has no name on the Hub
    base = "tiny.PATH" if is_embedded else json.dumps(run["model"] if lora else folder.name)
    lines = ["from diffusers import DiffusionPipeline"]
    lines += ["from diffusion_grpo import tiny"] if is_embedded else []
    lines += ["", f"pipe = DiffusionPipeline.from_pretrained({base})"]
    if lora:
        lines.append(f'pipe.load_lora_weights("{folder.name}")')
        for name in run["component"].split(", ")[1:]:
            lines.append(f'pipe.load_lora_weights("{folder.name}/{name}", load_into_{name}=True)')
    return "\n".join(lines)


def _reward_table(run: dict[str, Any], history: list[dict[str, Any]]) -> str:
    evaluations = [entry for entry in history if "eval_reward" in entry]
    weights = dict(zip(run["reward_funcs"], run["reward_weights"], strict=True))
    lines = ["| reward | weight | before | after |", "|---|---|---|---|"]
    for name in [*run["reward_funcs"], *run["eval_reward_funcs"]]:
        key = f"eval_rewards/{name}/mean"
        values = [f"{entry[key]:.3f}" if key in entry else "–" for entry in evaluations[:1] + evaluations[-1:]]
        before, after = values if len(values) == 2 else ("–", "–")
        lines.append(f"| {name} | {weights.get(name, 'only evaluated')} | {before} | {after} |")
    return "\n".join(lines)


def _pictures(folder: Path) -> list[tuple[str, str]]:
    pictures = [("reward", "curve.png"), ("the same prompts and seeds over the training", "grid.png")]
    return [(title, file) for title, file in pictures if (folder / file).is_file()]
