"""The model card, `README.md`: how to load the weights, rewards, images before and after, how to reproduce the run."""

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from PIL import Image

from ..data.held_out import describe_prompts
from ..run.card_data import is_repo_id
from ..run.folder import Run, format_updates, name_method, read_run
from ..run.reproduce import describe_reproduction
from ..weights.public_names import strip_folders
from .gallery import find_file, pair_samples
from .usage import names_hub_model, write_usage

logger = logging.getLogger(__name__)
OWN_TAG = "diffusion-grpo"  # marks cards that this library has written
FOLDER = "images"  # subfolder of the run's folder
SHOWN, WIDEST = 4, 512  # samples, and their width in pixels
# files that a card wrote; the folder may hold others
OWN_FILE = re.compile(r"\d+-(before|after|input)\.(png|mp4|wav)")
IMAGES = {"reward": "curve.png", "the same prompts and seeds during the run": "grid.png"}
SPECIAL = re.compile(r"([\\`*\[\]<>|#~$&!])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])")


@dataclasses.dataclass(frozen=True)
class CardDetails:
    """Details of a model card in addition to those from the run. None or empty values leave the run's, if any."""

    title: str | None = None
    datasets: tuple[str, ...] = ()
    dataset_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    license: str | None = None
    base_model: str | None = None
    task: str | None = None

    def add(
        self,
        *,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        language: str | list[str] | None = None,
        license: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
    ) -> "CardDetails":
        """Return a copy in which the given details replace the present ones; see `Trainer.create_model_card`."""
        added = {
            "title": model_name,
            "datasets": tuple(dict.fromkeys(_as_tuple(dataset_name) + _as_tuple(dataset_tags))),
            "dataset_names": _as_tuple(dataset),
            "tags": _as_tuple(tags),
            "language": _as_tuple(language),
            "license": license,
            "base_model": finetuned_from,
            "task": tasks,
        }
        return dataclasses.replace(self, **{name: value for name, value in added.items() if value})


def _as_tuple(texts: str | Iterable[str] | None) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts or ())


def write_model_card(
    folder: str | Path,
    run: dict[str, Any],
    history: list[dict[str, Any]],
    updates: int,
    repository: str | None = None,
    details: CardDetails | None = None,
) -> None:
    """Write `README.md` with base model, rewards, settings, curve and sample images, and the images that it shows.

    A `README.md` that was not written by this library is kept, with a warning.
    """
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
    is_whole = (folder / "model_index.json").is_file()  # a checkpoint of full training holds networks only
    text = (
        _make_environment()
        .get_template("card.md.jinja")
        .render(
            run=run,
            details=details,
            metadata=_make_metadata(run, pairs, details).to_yaml(),
            title=details.title or source.split("/")[-1],
            links=", ".join(map(_link_dataset, details.datasets)),
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
            prompts=describe_prompts(run.get("prompts", {})),
            pairs=pairs,
            times=[format_updates(step) for step in (min(results.samples), max(results.samples))] if pairs else [],
            images=[(title, file) for title, file in IMAGES.items() if (folder / file).is_file()],
            reproduction=describe_reproduction(folder, run, repository),
            settings=json.dumps(run["settings"], indent=2),
        )
    )
    ModelCard(text).save(folder / "README.md")


def _make_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"md": escape, "code": code, "after": format_updates, "number": _format_number}
    return environment


def _format_number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) and not math.isnan(value) else "–"


def _make_metadata(run: dict[str, Any], pairs: list[dict[str, Any]], details: CardDetails) -> ModelCardData:
    """Return the metadata of a card, which the Hub reads."""
    is_lora, base = run["trains_by"] != "full", details.base_model or run["model"]
    fields = {} if details.license else run.get("license", {})  # a licence comes with its name and link
    if names_hub_model(base):
        fields = fields | {"base_model": base, "base_model_relation": "adapter" if is_lora else "finetune"}
    added = {
        "pipeline_tag": details.task or run.get("pipeline_tag"),
        "datasets": [name for name in details.datasets if is_repo_id(name)],
        "language": list(details.language),
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
        tags=[OWN_TAG, "grpo", "reinforcement-learning", *(["lora"] if is_lora else []), *details.tags],
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
    pairs: list[dict[str, Any]] = []
    for pair in pair_samples(run):
        files = {when: find_file(run, pair[when].get("image")) for when in ("before", "after")}
        if len(pairs) == SHOWN or None in files.values():
            continue
        samples = {when: _copy(run, pair[when], file, f"{len(pairs)}-{when}") for when, file in files.items()}
        taken = find_file(run, pair["after"].get("input"))
        taken = taken and _copy_image(run, taken, f"{len(pairs)}-input")
        pairs.append({"prompt": pair["prompt"], **samples, "input": taken})
    return pairs


def _copy(run: Run, row: dict, image: Path, stem: str) -> dict[str, Any]:
    shown = file = _copy_image(run, image, stem)
    source = find_file(run, row.get("file"))
    if source is not None and source.suffix in (".mp4", ".wav"):
        file = f"{FOLDER}/{stem}{source.suffix}"
        shutil.copyfile(source, run.path / file)
    return {"image": shown, "file": file, "reward": row["reward"]}


def _copy_image(run: Run, image: Path, stem: str) -> str:
    """Copy an image, scaled down, into the folder `images`, and return its path in the run's folder."""
    (run.path / FOLDER).mkdir(exist_ok=True)
    with Image.open(image) as loaded:
        small = loaded.convert("RGB")
    small.thumbnail((WIDEST, WIDEST))
    small.save(run.path / FOLDER / f"{stem}.png")
    return f"{FOLDER}/{stem}.png"


def escape(text: str) -> str:
    r"""Escape arbitrary text so that one line of Markdown shows it literally.

    Example:
        >>> escape("a|b <i>")
        'a\\|b \\<i\\>'
    """
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
