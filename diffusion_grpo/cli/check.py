"""`diffusion-grpo check`: show whether a pipeline can be trained, and how exactly it replays."""

import argparse
import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..config.files import check_model_name
from ..quiet import hide_loading_bars
from ..sampling import settings as sample_settings

if TYPE_CHECKING:
    from ..policy.check import ReplayReport


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="Hub id or folder of a diffusers pipeline, or `tiny`")
    command.add_argument("--prompt", default="a photo of a cat", help="prompt to sample; default: %(default)s")
    sample_settings.add_options(command, "num_inference_steps")
    command.add_argument("--sde_type", default="auto", help="SDE of the denoising steps; default: %(default)s")
    command.add_argument("--noise_level", type=float, default=None, help="noise level of the SDE; default: its own")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the replay report as a table. Return 0 if the pipeline can be trained, else 1."""
    inputs = {"prompt": arguments.prompt, "num_inference_steps": 4, **sample_settings.read_call_options(arguments)}
    arguments.model_init_kwargs = sample_settings.parse_json_object(arguments.model_init_kwargs, "--model_init_kwargs")
    check_model_name(arguments.model)
    from ..policy.sde import SDES

    if arguments.sde_type not in (known := ["auto", *SDES]):
        raise ValueError(f"--sde_type {arguments.sde_type} is unknown; choose one of {', '.join(known)}.")
    from rich.console import Console
    from rich.table import Table

    from ..data.inputs import find_missing
    from ..training.model_checks import check_packages
    from ..training.model_index import pipeline_class

    pipeline = pipeline_class(arguments.model, arguments)
    check_packages(arguments.model, arguments)
    if pipeline is not None and (missing := find_missing(inspect.signature(pipeline.__call__).parameters, inputs)):
        raise ValueError(
            f"{pipeline.__name__} cannot be called without {missing[0]!r}; load it in Python, and call "
            f"check_pipeline(pipe, {{..., {missing[0]!r}: ...}})."
        )
    hide_loading_bars(arguments.model)
    replay = replay_once(arguments, inputs)
    table = Table(show_header=False, title=f"{arguments.model}: {'trains' if replay.trains else 'does not train'}")
    for field in fields(replay):
        value = getattr(replay, field.name)
        if value is not None and value != "":
            table.add_row(field.name, f"{value:.3g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return 0 if replay.trains else 1


def replay_once(arguments: argparse.Namespace, inputs: dict[str, Any]) -> "ReplayReport":
    """Load the pipeline, and compare a rollout with its replay."""
    import torch
    from diffusers import ModelMixin

    from ..policy.check import check_pipeline
    from ..training.model import choose_device, load_plain_pipeline
    from ..weights.files import load_weights

    try:
        source = arguments.model, arguments.dtype, arguments.device, False, arguments.model_init_kwargs
        pipe = load_plain_pipeline(*source)
        if arguments.lora is not None:
            load_weights(pipe, arguments.lora)
        pipe.to(choose_device(arguments.device))
        for part in pipe.components.values():  # replays then keep few activations, as in training
            if isinstance(part, ModelMixin) and part._supports_gradient_checkpointing:
                part.enable_gradient_checkpointing()
        return check_pipeline(
            pipe,
            {name: value for name, value in inputs.items() if name != "num_inference_steps"},
            num_inference_steps=inputs["num_inference_steps"],
            sde_type=arguments.sde_type,
            noise_level=arguments.noise_level,
            seed=arguments.seed or 0,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{arguments.model} and one replay do not fit into the accelerator's memory, so it was not checked "
            "whether the model trains; set a smaller --height and --width, --dtype bfloat16, or --device cpu."
        ) from error
