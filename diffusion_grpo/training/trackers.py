"""Trackers that `report_to` names: checked, adapted to diffusers' configs, and sent images, videos and sounds."""

import contextlib
import functools
import importlib.util
import json
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import nn
from transformers import TrainerCallback
from transformers.integrations import (
    ClearMLCallback,
    CometCallback,
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler

from ..media.files import read_sound, read_video
from ..media.samples import frame_positions
from ..policy.networks import replace_attribute

TITLE_HEIGHT, TITLE_LINES = 52, 4  # pixels and lines of the prompts above a grid
GRID_CELL = 256  # pixels, the longest side of an image in the grid
STRIP_FRAMES, STRIP_CELL = 8, 128  # frames and their size in the image that shows a video
# Modules of each tracker, by its name in transformers; torch also writes with tensorboardX
TRACKERS = {name: (name,) for name in ("clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")}
TRACKERS["tensorboard"] = ("tensorboard", "tensorboardX")


def check_trackers(names: list[str], logs: bool) -> None:
    """Refuse trackers that cannot be used; transformers would do so only after loading the model."""
    get_reporting_integration_callbacks(names)
    for name in names:
        if name in TRACKERS and not any(importlib.util.find_spec(module) for module in TRACKERS[name]):
            package = name.replace("_", "-")
            raise ImportError(f"report_to={name!r} needs a package: pip install {package}, or set report_to='none'.")
    if "wandb" in names and logs and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            wandb.login(verify=False)  # asks for the key in a terminal
        except wandb.errors.UsageError as error:
            raise ValueError(
                "report_to='wandb': no login; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline."
            ) from error


def patch_trackers(handler: CallbackHandler) -> None:
    """Let those of transformers' tracker callbacks that read a model's config, and their subclasses, read ours."""
    for callback in handler.callbacks:
        if isinstance(callback, (ClearMLCallback, CometCallback, MLflowCallback, WandbCallback)):
            callback.setup = _show_config(callback.setup)
        elif isinstance(callback, TensorBoardCallback):
            callback.on_train_begin = _show_config(callback.on_train_begin)


def _show_config(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a callback's method so that a diffusers config has the methods of a transformers config that it calls."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        model = next((value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)), None)
        config = getattr(model, "config", None)
        with contextlib.ExitStack() as stack:
            if isinstance(config, dict) and not hasattr(config, "to_dict"):
                as_json = json.dumps(dict(config), indent=2, default=str)
                stack.enter_context(replace_attribute(config, "to_dict", lambda: dict(config)))
                stack.enter_context(replace_attribute(config, "to_json_string", lambda: as_json))
            method(*args, **kwargs)

    return call


def draw_grid(
    rows: dict[str, list[Path | Image.Image | None]], cell: int = GRID_CELL, titles: Sequence[str] = ()
) -> Image.Image:
    """Draw images in rows, each with a label on its left, and a title above each column."""
    loaded = {label: [image and _fit(image, cell) for image in images] for label, images in rows.items()}
    width = max((image.width for images in loaded.values() for image in images if image), default=1)
    height = max((image.height for images in loaded.values() for image in images if image), default=1)
    columns, margin, gap = max((len(images) for images in loaded.values()), default=0), 64, 4
    top = TITLE_HEIGHT if titles else 0
    grid = Image.new("RGB", (margin + columns * (width + gap), top + len(loaded) * (height + gap)), "white")
    draw = ImageDraw.Draw(grid)
    for column, title in enumerate(titles):
        lines = textwrap.wrap(title, max(width // 6, 4), max_lines=TITLE_LINES, placeholder="...")  # 6 pixels a letter
        draw.multiline_text((margin + column * (width + gap), 2), "\n".join(lines), fill="black", spacing=1)
    for row, (label, images) in enumerate(loaded.items()):
        draw.text((4, top + row * (height + gap) + 4), label, fill="black")
        for column, image in enumerate(images):
            if image is not None:
                grid.paste(image, (margin + column * (width + gap), top + row * (height + gap)))
    return grid


def _fit(image: Path | Image.Image, cell: int) -> Image.Image:
    image = (Image.open(image) if isinstance(image, Path) else image).convert("RGB")
    scale = cell / max(image.size)
    return image if scale >= 1 else image.resize([max(1, round(side * scale)) for side in image.size])


def draw_film_strips(videos: list[Path]) -> Image.Image:
    """Draw a row of evenly spaced frames per video, including the first and the last, to show motion in one image."""
    rows = {}
    for path in videos:
        frames = read_video(path)
        rows[path.stem] = [frames[place] for place in frame_positions(STRIP_FRAMES, len(frames))]
    return draw_grid(rows, STRIP_CELL)


def log_image(callbacks: list[TrainerCallback], name: str, image: Image.Image, step: int) -> None:
    """Send an image to each active tracker that shows images: tensorboard, wandb, trackio, mlflow."""
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_image(name, np.asarray(image), step, dataformats="HWC")
        elif isinstance(callback, WandbCallback):
            callback._wandb.log({name: callback._wandb.Image(image), "train/global_step": step})
        elif isinstance(callback, TrackioCallback):
            callback._trackio.log({name: callback._trackio.Image(image), "train/global_step": step})
        elif isinstance(callback, MLflowCallback):
            callback._ml_flow.log_image(image, key=name, step=step)


def log_files(callbacks: list[TrainerCallback], name: str, files: list[Path], step: int) -> None:
    """Send videos (MP4) and sounds (WAV) to each active tracker, each under its own name to give it a history.

    tensorboard shows no MP4: it gets an image with frames of each video, and sounds as they are. mlflow gets the files
    as artifacts, in a folder per step.
    """
    videos = [path for path in files if path.suffix == ".mp4"]
    for callback in callbacks if files else []:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            if videos:
                frames = np.asarray(draw_film_strips(videos))
                callback.tb_writer.add_image(f"{name}/frames", frames, step, dataformats="HWC")
            for path in (path for path in files if path not in videos):
                sound, rate = read_sound(path)
                callback.tb_writer.add_audio(f"{name}/{path.stem}", sound.mean(axis=0), step, sample_rate=rate)
        elif isinstance(callback, (WandbCallback, TrackioCallback)):
            tracker = callback._wandb if isinstance(callback, WandbCallback) else callback._trackio
            media = {path: (tracker.Video if path in videos else tracker.Audio)(str(path)) for path in files}
            tracker.log({f"{name}/{path.stem}": shown for path, shown in media.items()} | {"train/global_step": step})
        elif isinstance(callback, MLflowCallback):
            for path in files:
                callback._ml_flow.log_artifact(str(path), artifact_path=f"{name}/step-{step:06d}")
