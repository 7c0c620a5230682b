"""Record how a run was started, so that it can be reproduced: `train.yaml`, and the command for the model card."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config.arguments import LAUNCH_VARIABLE
from ..weights.public_names import SECRET, strip_folders, strip_secrets

SETTINGS_FILE = "train.yaml"  # name in the run's folder
# settings of one launch, which are not part of the run
LOCAL = {"output_dir", "logging_dir", "resume_from_checkpoint", "report_experiment", "run_name"}
LOCAL |= {"push_to_hub", "push_samples", "machine_rank", "main_process_ip", "main_process_port"}


def save_settings(folder: str | Path, values: Mapping[str, Any]) -> None:
    """Write `train.yaml`, from which this run can be started again.

    Absolute paths are reduced to their last part, and secrets are left out, because the file is published with the
    weights.
    """
    kept = {key: value for key, value in values.items() if key not in LOCAL and not key.startswith("hub_")}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = strip_folders(strip_secrets(kept)) | {"output_dir": f"outputs/{folder.resolve().name}"}
    # every version of YAML reads JSON in the same way
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    (folder / SETTINGS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def refuse_own_settings(file: str | Path, folder: str | Path) -> None:
    """Refuse a user's settings file that the run would overwrite with its `train.yaml`.

    A file that a run wrote is accepted: each of its values is JSON, so it has no comments to lose.
    """
    file = Path(file)
    if file.resolve() != (Path(folder).expanduser() / SETTINGS_FILE).resolve():
        return
    lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if not (lines[-1].startswith('output_dir: "outputs/') and all(map(_holds_json, lines))):
        raise ValueError(
            f"{file} is where the run writes its own settings, without comments and paths; rename the file, or choose "
            "another output_dir."
        )


def _holds_json(line: str) -> bool:
    try:
        json.loads(line.partition(": ")[2])
    except ValueError:
        return False
    return True


def describe_script(argv: Sequence[str], processes: int) -> str | None:
    """Return the command of a run that was started by a Python script; None if it was not."""
    script = Path(argv[0]) if argv and argv[0] else None
    if script is None or script.suffix != ".py" or script.name in ("ipykernel_launcher.py", "__main__.py"):
        return None
    starter = ["python"] if processes == 1 else ["accelerate", "launch", "--num_processes", str(processes)]
    return shlex.join([*starter, script.name, *_strip_secret_words(argv[1:])])


def _strip_secret_words(words: Sequence[str]) -> list[str]:
    """Reduce absolute paths to their last part, and replace the values of secret options by dots.

    User names and passwords in URLs are removed.
    """
    kept, hides_next = [], False
    for word in map(strip_secrets, words):
        name, equals, value = word.partition("=")
        is_flag = word.startswith("-")
        if is_flag and SECRET.search(name):
            kept.append(f"{name}=..." if equals else name)
            hides_next = not equals
            continue
        if is_flag and equals:
            kept.append(f"{name}={strip_folders(value)}")
        else:
            kept.append("..." if hides_next and not is_flag else strip_folders(word))
        hides_next = False
    return kept


def list_local_files(settings: Mapping[str, Any]) -> list[str]:
    """List unpublished files that the command line's settings name: prompts, and code of rewards."""
    named = [str(settings[key]) for key in ("dataset", "eval_dataset") if settings.get(key)]
    files = [name for name in named if Path(name).suffix]
    rewards = [settings.get(key) or [] for key in ("reward_funcs", "eval_reward_funcs")]
    names = [name for group in rewards for entry in _as_list(group) for name in _as_list(entry)]
    modules = [f"{name.rpartition('.')[0].replace('.', '/')}.py" for name in names if "." in name]
    own = [module for module in modules if not module.startswith("diffusion_grpo/")]
    return list(dict.fromkeys([*files, *own]))


def _as_list(group: Any) -> list[Any]:
    """Return the names in a setting of rewards, which is a name, a mapping from names, or a list of both."""
    return [group] if isinstance(group, str) else list(group)


def describe_reproduction(folder: str | Path, run: Mapping[str, Any], repository: str | None) -> list[str]:
    """Return paragraphs of Markdown that say how to start the run again."""
    path = Path(folder) / SETTINGS_FILE
    if path.is_file():
        place = SETTINGS_FILE if repository is None else f"{repository.split('/')[-1]}/{SETTINGS_FILE}"
        command = shlex.join(["diffusion-grpo", "train", place])
        if repository is not None:
            local = repository.split("/")[-1]
            command = f"{shlex.join(['hf', 'download', repository, SETTINGS_FILE, '--local-dir', local])}\n{command}"
        text = [f"`{SETTINGS_FILE}` holds every setting of this run.", _block(command)]
        files = list_local_files(yaml.safe_load(path.read_text(encoding="utf-8")))
        if files:
            listed = ", ".join(f"`{file}`" for file in files)
            text.append(f"It names files that are not published with the weights: {listed}.")
        return text
    command = run.get("command")
    if command is None:
        return ["It was started from Python; the settings are below."]
    return ["It was started by a Python script, which is not published with the weights:", _block(command)]


def _block(command: str) -> str:
    fence = "`" * 3
    return f"{fence}shell\n{command}\n{fence}"


def read_launch(values: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the settings of processes for `train.yaml`."""
    told = json.loads(os.environ.get(LAUNCH_VARIABLE, "{}"))
    given = told or {key: value for key, value in values.items() if value is not None}
    return given if given or world_size == 1 else {"num_processes": world_size}
