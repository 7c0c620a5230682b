"""Read and check what settings name, without torch: text files, folders, models, checkpoints, the token of the Hub."""

import os
from pathlib import Path
from typing import Any

INDEXES = ("model_index.json", "modular_model_index.json")  # of classic and of modular pipelines


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8, with or without a byte order mark."""
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: this is not UTF-8; save the file with the encoding UTF-8.") from None


def expand_home(value: Any) -> Any:
    """Return a setting, or those in lists and mappings, with `~` at the start of a path as the home folder."""
    if isinstance(value, dict):
        return {name: expand_home(item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


def check_folder(name: str, path: str | Path) -> None:
    """Refuse a path that cannot become a folder, because it, or a part of it, is a file."""
    folder = Path(path).expanduser()
    for part in (folder, *folder.parents):
        if part.is_file():
            raise ValueError(f"{name}: {part} is a file; give the path of a folder.")


def check_model_name(model: str) -> None:
    """Check that `model`, if it is a local folder, holds a pipeline."""
    folder = Path(model).expanduser()
    if model == "tiny":
        return
    if folder.exists() and not any((folder / name).is_file() for name in INDEXES):
        raise ValueError(
            f"model: {model} is not the folder of a diffusers pipeline, which holds a model_index.json; give such a "
            "folder, a Hub id, or `tiny`."
        )
    if not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise ValueError(
            f"model: there is no folder {model}, and a Hub id has the form `owner/name`; give an existing folder or a "
            "Hub id."
        )


def check_resume_folder(wanted: Any) -> None:
    """Refuse a checkpoint whose folder does not exist."""
    folder = Path(str(wanted))
    if wanted is None or str(wanted).lower() in ("true", "false", "") or folder.is_dir():
        return
    if folder.with_name(f"tmp-{folder.name}-old").is_dir():  # left by a kill, and restored when the run starts
        return
    raise ValueError(f"resume_from_checkpoint: there is no folder {wanted}; give that of a checkpoint, or true.")


def check_hub_access(token: str | None) -> None:
    """Refuse to push to the Hub while offline or without a token."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError("push_to_hub needs the Hub, but HF_HUB_OFFLINE is set; unset one of them.")
    if not (token or get_token()):
        raise ValueError("push_to_hub needs a token of the Hub; run `hf auth login`, or set HF_TOKEN or hub_token.")
