"""Data for the model card's header, and patterns of the files that are published.

Published names do not contain folders of this machine.
"""

import inspect
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

import yaml
from diffusers import DiffusionPipeline
from huggingface_hub import metadata_load, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

logger = logging.getLogger(__name__)
LICENSE_FIELDS = ("license", "license_name", "license_link")
# Left out of every push. diffusers takes any file with the last name for a repository's LoRA: only the average has it
UNPUBLISHED = ["_*", "checkpoint-*", "tmp-*", "abandoned/*", "policy/*pytorch_lora_weights.safetensors"]
# Pushed without push_samples: weights and the configs that diffusers needs, the card and its images, and run.json,
# which says to which network a LoRA belongs
PUBLISHED = ["README.md", "curve.png", "grid.png", "*.safetensors", "*.safetensors.index.json", "*config.json"]
PUBLISHED += ["model_index.json", "train.yaml", "run.json"]
PUBLISHED += ["images/*-before.*", "images/*-after.*", "images/*-input.*"]
SAMPLES = ["samples/*", "evaluations/*", "validation/*", "failures/*", "runs/*"]


def is_repo_id(name: str) -> bool:
    """Return whether a name is valid for a repository on the Hub, and is not an existing local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def name_repository(pushed: str | None, planned: str | None) -> str | None:
    """Return the Hub id under which readers find a run's weights; None if they are only in its folder."""
    return pushed or (planned if planned is not None and "/" in planned else None)


def pipeline_tag(pipeline: type[DiffusionPipeline], given: Iterable[str]) -> str | None:
    """Return the Hub's name of the task that a pipeline was trained on; None if the Hub has none."""
    parameters = inspect.signature(pipeline.__call__).parameters
    if "Prior" in pipeline.__name__:  # makes embeddings for another pipeline
        return None
    source = "video" if "video" in given else "image" if {"image", "images"} & set(given) else "text"
    if {"num_frames", "video_length", "video"} & parameters.keys():
        return f"{source}-to-video"
    if any(name.startswith("audio_") for name in parameters):
        return "text-to-audio"
    return f"{source}-to-image" if "prompt" in parameters else "unconditional-image-generation"


def find_license(model: str) -> dict[str, str]:
    """Read the licence fields of the base model's card, if that card is on this machine; nothing is downloaded."""
    if model == "tiny":
        return {"license": "apache-2.0"}
    card = Path(model).expanduser() / "README.md"
    if not card.is_file() and model.count("/") == 1:
        cached = try_to_load_from_cache(model, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    if not card.is_file():
        return {}
    try:
        data = metadata_load(card) or {}
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("The licence of %s is left out of the model card: %s cannot be read (%s).", model, card, error)
        return {}
    return {name: data[name] for name in LICENSE_FIELDS if isinstance(data.get(name), str)}


def list_upload_patterns(components: Collection[str], push_samples: bool) -> dict[str, list[str] | None]:
    """Return `allow_patterns` and `ignore_patterns` of `upload_folder` for a run's folder."""
    if push_samples:
        return {"allow_patterns": None, "ignore_patterns": UNPUBLISHED}
    allowed = [*PUBLISHED, *(f"{name}/*" for name in components)]
    return {"allow_patterns": allowed, "ignore_patterns": [*UNPUBLISHED, *SAMPLES]}
