"""The model card, `README.md`: how to load the weights, rewards, images before and after, how to reproduce the run.

The name of the repository on the Hub, and which files are uploaded, are decided here too.
"""

import dataclasses
import json
import logging
import math
import re
import shlex
import shutil
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from PIL import Image

from ..config.files import INDEXES
from ..data.held_out import describe_prompts
from ..weights.public_names import strip_folders
from .record import SETTINGS_FILE
from .run_folder import Run, format_updates, name_method, read_run
from .usage import is_repo_id, load_templates, names_hub_model, write_usage

logger = logging.getLogger(__name__)
OWN_TAG = "diffusion-grpo"  # marks cards that this library has written
FOLDER = "images"  # subfolder of the run's folder
SHOWN, WIDEST = 4, 512  # samples, and their width in pixels
TIMES = ("before", "after")
# files that a card wrote; the folder may hold others
OWN_FILE = re.compile(r"\d+-(before|after|input)\.(png|mp4|wav)")
IMAGES = {"reward": "curve.png", "the same prompts and seeds during the run": "grid.png"}
SPECIAL = re.compile(r"([\\`*\[\]<>|#~$&!])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])")
# Left out of every push. diffusers takes any file with the last name for a repository's LoRA: only the average has it
UNPUBLISHED = ["_*", "checkpoint-*", "tmp-*", "abandoned/*", "policy/*pytorch_lora_weights.safetensors"]
# Pushed without push_samples: weights and the configs that diffusers needs, the card and its images, and run.json,
# which says to which network a LoRA belongs
PUBLISHED = ["README.md", "curve.png", "grid.png", "*.safetensors", "*.safetensors.index.json", "*config.json"]
PUBLISHED += [*INDEXES, "train.yaml", "run.json"]
PUBLISHED += ["images/*-before.*", "images/*-after.*", "images/*-input.*"]
SAMPLES = ["samples/*", "evaluations/*", "validation/*", "failures/*", "runs/*"]


@dataclasses.dataclass(frozen=True)
class CardDetails:
    """What `Trainer.create_model_card` was given; empty values leave what is known of the run."""

    model_name: str | None = None
    dataset_name: str | Iterable[str] = ()
    tags: str | Iterable[str] = ()
    language: str | Iterable[str] = ()
    license: str | None = None
    finetuned_from: str | None = None
    tasks: str | None = None
    dataset_tags: str | Iterable[str] = ()
    dataset: str | Iterable[str] = ()

    def add(self, **details: Any) -> "CardDetails":
        """Return a copy in which the given details replace the present ones."""
        return dataclasses.replace(self, **{name: value or getattr(self, name) for name, value in details.items()})

    def texts(self, *names: str) -> list[str]:
        """Return the texts of some details, each once."""
        values = (getattr(self, name) for name in names)
        return list(dict.fromkeys(text for value in values for text in ([value] if isinstance(value, str) else value)))


def name_repository(pushed: str | None, planned: str | None) -> str | None:
    """Return the Hub id under which readers find a run's weights; None if they are only in its folder."""
    return pushed or (planned if planned is not None and "/" in planned else None)


def list_upload_patterns(components: Collection[str], push_samples: bool) -> dict[str, list[str] | None]:
    """Return `allow_patterns` and `ignore_patterns` of `upload_folder` for a run's folder."""
    if push_samples:
        return {"allow_patterns": None, "ignore_patterns": UNPUBLISHED}
    allowed = [*PUBLISHED, *(f"{name}/*" for name in components)]
    return {"allow_patterns": allowed, "ignore_patterns": [*UNPUBLISHED, *SAMPLES]}


def write_model_card(
    folder: str | Path,
    run: dict[str, Any],
    history: list[dict[str, Any]],
    updates: int,
    repository: str | None = None,
    details: CardDetails | None = None,
) -> None:
    """Write `README.md` with base model, rewards, settings, curve and sample images, and the images that it shows."""
    folder, details = Path(folder), details or CardDetails()
    if not _is_own_card(folder / "README.md"):
        logger.warning(
            "%s was not written by a run, so it is kept and no model card is written.", folder / "README.md"
        )
        return
    source = repository or folder.resolve().name
    results = read_run(folder) if (folder / "run.json").is_file() else None
    last, best = updates, run.get("published_after")
    if best is not None:  # the card describes the published weights only
        updates, history = best, [entry for entry in history if entry["step"] <= best]
        results = results and results.cut(best)
    pairs = [] if results is None else write_card_samples(results)
    evaluations = [entry for entry in history if "eval_reward" in entry]
    method, papers = name_method(run)
    is_whole = any((folder / name).is_file() for name in INDEXES)  # a checkpoint of full training holds networks only
    datasets = details.texts("dataset_name", "dataset_tags")
    text = _load_template().render(
        run=run,
        metadata=_make_metadata(run, pairs, details, datasets).to_yaml(),
        title=details.model_name or source.split("/")[-1],
        dataset_names=details.texts("dataset"),
        links=", ".join(map(_link_dataset, datasets)),
        method=method,
        papers=papers,
        source=source,
        repository=repository,
        updates=updates,
        best=best,
        last=last,
        usage=write_usage(run, source, pairs[0]["prompt"] if pairs else None, repository is not None, is_whole),
        evaluations=evaluations[:1] + evaluations[1:][-1:],
        rewards=_list_rewards(run, [] if results is None else results.datasets),
        prompts=describe_prompts(run["prompts"]),
        pairs=pairs,
        times=[format_updates(step) for step in (min(results.samples), max(results.samples))] if pairs else [],
        images=[(title, file) for title, file in IMAGES.items() if (folder / file).is_file()],
        settings_file=SETTINGS_FILE if (folder / SETTINGS_FILE).is_file() else None,
        settings=json.dumps(run["settings"], indent=2),
    )
    ModelCard(text).save(folder / "README.md")


@cache
def _load_template() -> jinja2.Template:
    """Return the card's template, which writes texts of users by the filters of this module."""
    environment = load_templates()
    environment.filters |= {"md": escape, "code": code, "after": format_updates, "number": _format_number}
    environment.filters["shell"] = shlex.join
    return environment.get_template("card.md.jinja")


def _format_number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) and not math.isnan(value) else "–"


def _make_metadata(
    run: dict[str, Any], pairs: list[dict[str, Any]], details: CardDetails, datasets: list[str]
) -> ModelCardData:
    """Return the metadata of a card, which the Hub reads."""
    is_lora, base = run["trains_by"] != "full", details.finetuned_from or run["model"]
    fields = {} if details.license else run.get("license", {})  # a licence comes with its name and link
    if names_hub_model(base):
        fields = fields | {"base_model": base, "base_model_relation": "adapter" if is_lora else "finetune"}
    added = {
        "pipeline_tag": details.tasks or run.get("pipeline_tag"),
        "datasets": [name for name in datasets if is_repo_id(name)],
        "language": details.texts("language"),
        "license": details.license,
        # the gallery that the Hub shows above a card; it shows no sound
        "widget": [
            {"text": pair["prompt"], "output": {"url": pair["after"]["file"]}}
            for pair in pairs
            if not pair["after"]["file"].endswith(".wav")
        ],
    }
    return ModelCardData(
        library_name="diffusers",
        tags=[OWN_TAG, "grpo", "reinforcement-learning", *(["lora"] if is_lora else []), *details.texts("tags")],
        **fields | {name: value for name, value in added.items() if value},
    )


def _is_own_card(path: Path) -> bool:
    """Return whether a card may be written there: there is none yet, or one that this library wrote."""
    if not path.exists():
        return True
    try:
        data = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError):  # its metadata is not valid YAML
        return False
    return OWN_TAG in (data.get("tags") or [])


def _link_dataset(name: str) -> str:
    shown = escape(strip_folders(name))
    return f"[{shown}](https://huggingface.co/datasets/{name})" if is_repo_id(name) else shown


def _list_rewards(run: dict[str, Any], datasets: list[str]) -> list[tuple[str, float | str, str]]:
    """Return name, weight and the evaluations' metric of each row in the table of rewards."""
    weights = dict(zip(run["reward_funcs"], run["reward_weights"], strict=True))
    names = [*run["reward_funcs"], *run["eval_reward_funcs"]]
    rows = [(name, weights.get(name, "only evaluated"), f"eval_rewards/{name}/mean") for name in names]
    return rows + [(f"all, on {dataset}", "", f"eval_{dataset}_reward") for dataset in datasets]


def write_card_samples(run: Run) -> list[dict[str, Any]]:
    """Copy the first samples of the evaluations, not hand-picked, into the folder `images`."""
    folder = run.path / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():  # those of an earlier card
        if OWN_FILE.fullmatch(path.name) and not path.is_dir():
            path.unlink()
    shown = [pair for pair in run.pair_samples() if all(run.find_file(pair[at].get("image")) for at in TIMES)][:SHOWN]
    return [
        {"prompt": pair["prompt"], "input": _copy_image(run, pair["after"].get("input"), f"{number}-input")}
        | {at: _copy(run, pair[at], f"{number}-{at}") for at in TIMES}
        for number, pair in enumerate(shown)
    ]


def _copy(run: Run, row: dict, stem: str) -> dict[str, Any]:
    image = file = _copy_image(run, row["image"], stem)
    source = run.find_file(row.get("file"))
    if source is not None and source.suffix in (".mp4", ".wav"):
        file = f"{FOLDER}/{stem}{source.suffix}"
        shutil.copyfile(source, run.path / file)
    return {"image": image, "file": file, "reward": row["reward"]}


def _copy_image(run: Run, name: str | None, stem: str) -> str | None:
    """Copy an image of the run, if it is there, scaled down into the folder `images`; return its path in the run."""
    source = run.find_file(name)
    if source is None:
        return None
    (run.path / FOLDER).mkdir(exist_ok=True)
    with Image.open(source) as loaded:
        small = loaded.convert("RGB")
    small.thumbnail((WIDEST, WIDEST))
    small.save(run.path / FOLDER / f"{stem}.png")
    return f"{FOLDER}/{stem}.png"


def escape(text: str) -> str:
    """Escape arbitrary text so that one line of Markdown shows it literally."""
    return SPECIAL.sub(r"\\\g<0>", _one_line(text))


def code(text: str) -> str:
    """Format `text` as a code span, fenced by more backquotes than it contains in a row."""
    text = _one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _one_line(text: str) -> str:
    """Replace line breaks and other unprintable characters by a space."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
