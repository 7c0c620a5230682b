"""Data for the model card's header, and patterns of the files that are published.

Published names do not contain folders of this machine.
"""

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from diffusers import DiffusionPipeline
from huggingface_hub import metadata_load, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

logger = logging.getLogger(__name__)
# names of secrets
SECRET = re.compile(r"(token|secret|password|authorization|(api|access|secret)[_-]?key|credentials?)$", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/\s]*@")  # a name or a password in a URL
URL = re.compile(r"://\S+")
QUERY_VALUE = re.compile(r"([?&;#][^=?&;#\s]+=)[^&;#\s]+")
# Characters forbidden in Windows file names tell a path from a regular expression such as `A:\s*(\d)`.
WINDOWS_PATH = re.compile(r"""([A-Za-z]:[\\/]|\\\\[\w.-]+\\[\w.$' -]+\\)[^<>:"|?*\n]+""")
HOMES = ("home", "Users")  # home folders, also on another machine
LICENSE_FIELDS = ("license", "license_name", "license_link")
# Left out of every push. diffusers takes any file with the last name for a repository's LoRA: only the average has it
UNPUBLISHED = ["_*", "checkpoint-*", "tmp-*", "abandoned/*", "policy/*pytorch_lora_weights.safetensors"]
# Pushed without push_samples: weights and the configs that diffusers needs, the card and its images, and run.json,
# which says to which network a LoRA belongs
PUBLISHED = ["README.md", "curve.png", "grid.png", "*.safetensors", "*.safetensors.index.json", "*config.json"]
PUBLISHED += ["model_index.json", "train.yaml", "run.json"]
PUBLISHED += ["images/*-before.*", "images/*-after.*", "images/*-input.*"]
SAMPLES = ["samples/*", "evaluations/*", "validation/*", "failures/*", "runs/*"]


def public_model_name(model: str) -> str:
    """Return a model's name for publication: a Hub id as it is, or the last part of a local folder's path."""
    path = Path(model).expanduser()
    if not (path.is_absolute() or path.exists()):
        return strip_folders(model)  # a Hub id, or a path on another machine
    parts = path.resolve().parts
    cached = [part.removeprefix("models--") for part in parts if part.startswith("models--")]  # the Hub's cache
    return cached[-1].replace("--", "/", 1) if cached else parts[-1]


def public_source_name(source: str, model: str | None) -> str:
    """Return the public name of the model that a network was loaded from.

    Args:
        source: source of the network: a Hub id, or a folder, possibly in the Hub's cache.
        model: the pipeline's Hub id or folder. A network inside that folder gets the folder's name.
    """
    path = Path(source)
    is_local = path.is_absolute() or path.exists()
    if model and is_local and path.resolve().is_relative_to(Path(model).expanduser().resolve()):
        return public_model_name(model)
    return public_model_name(source)


def is_repo_id(name: str) -> bool:
    """Return whether a name is valid for a repository on the Hub, and is not an existing local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def name_repository(pushed: str | None, planned: str | None) -> str | None:
    """Return the Hub id under which readers find a run's weights; None if they are only in its folder.

    Args:
        pushed: id that the Hub returned.
        planned: the setting `hub_model_id`; without a namespace it names no repository until the first push.
    """
    return pushed or (planned if planned is not None and "/" in planned else None)


def strip_folders(value: Any) -> Any:
    """Reduce absolute paths in settings to their last part, for publication.

    Other text stays, such as a prompt that starts with a slash. A setting may be a mapping written as JSON.
    """
    if isinstance(value, dict):
        return {name: strip_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [strip_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    path = _find_path(value)
    return path.name if path is not None else _strip_json(value, strip_folders)


def _find_path(text: str) -> PurePath | None:
    """Return a text as a path if it is an absolute path within a folder; None for other text, such as a prompt."""
    if WINDOWS_PATH.fullmatch(text):
        return PureWindowsPath(text)
    path = PurePosixPath(text)
    if not path.is_absolute() or len(path.parts) < 3 or "\n" in text:
        return None
    # text with spaces may be prose, unless it starts with an existing folder
    first = path.parts[1]
    is_path = not re.search(r"\s", text) or first in HOMES or os.path.isdir(path.anchor + first)
    return path if is_path else None


def strip_secrets(value: Any) -> Any:
    """Remove secrets: dictionary entries whose name says so, such as a token, and the secret parts of URLs.

    These are user names, passwords and query values. A dictionary may be written as JSON.
    """
    if isinstance(value, dict):
        return {name: strip_secrets(item) for name, item in value.items() if not SECRET.search(str(name))}
    if isinstance(value, list):
        return [strip_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    stripped = _strip_json(value, strip_secrets)
    if stripped != value:
        return stripped
    return URL.sub(lambda url: QUERY_VALUE.sub(r"\1...", url[0]), USER_INFO.sub("", value))


def _strip_json(text: str, strip: Callable[[Any], Any]) -> str:
    """Apply `strip` to a text that is a JSON object or list; return other text unchanged."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        return text
    stripped = strip(found)
    return text if stripped == found else json.dumps(stripped, ensure_ascii=False)


def pipeline_tag(pipeline: type[DiffusionPipeline], given: Iterable[str]) -> str | None:
    """Return the Hub's name of the task that a pipeline was trained on; None if the Hub has none.

    Args:
        pipeline: class of the pipeline.
        given: names of the inputs that this run passes to it.
    """
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
    """Return `allow_patterns` and `ignore_patterns` of `upload_folder` for a run's folder.

    Args:
        components: components of the pipeline, whose folders hold weights.
        push_samples: whether samples, the report and trackers' events are published too: everything but checkpoints.
    """
    if push_samples:
        return {"allow_patterns": None, "ignore_patterns": UNPUBLISHED}
    allowed = [*PUBLISHED, *(f"{name}/*" for name in components)]
    return {"allow_patterns": allowed, "ignore_patterns": [*UNPUBLISHED, *SAMPLES]}
