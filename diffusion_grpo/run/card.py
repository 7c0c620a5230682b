"""The model card, `README.md`: how to load the weights, rewards, images before and after, how to reproduce the run."""

import json
import logging
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from ..data.held_out import describe_prompts
from . import markdown
from .card_details import CardDetails
from .card_samples import CardPair, draw_table, make_widget, write_card_samples
from .card_usage import names_hub_model, write_usage
from .folder import Run, format_updates, name_method, read_run
from .reproduce import describe_reproduction
from .weights import POLICY_FOLDER

logger = logging.getLogger(__name__)
OWN_TAG = "diffusion-grpo"  # marks cards that this library has written


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

    Args:
        folder: the run's output folder; images in it are shown.
        run: contents of `run.json`.
        history: the trainer's `log_history`.
        updates: number of updates made.
        repository: Hub id under which readers find the weights; None if they are only in this folder.
        details: details that the user adds. The default title is the name of the repository or the folder.
    """
    folder, details = Path(folder), details or CardDetails()
    if not _is_own_card(folder / "README.md"):
        logger.warning(
            "%s was not written by a run, so it is kept and no model card is written.", folder / "README.md"
        )
        return
    lora = run["trains_by"] != "full"
    source = repository or folder.resolve().name
    results = read_run(folder) if (folder / "run.json").is_file() else None
    last, best = updates, run.get("published_after")
    if best is not None:  # the card describes the published weights only
        updates, history = best, [entry for entry in history if entry["step"] <= best]
        results = results and results.cut(best)
    pairs = [] if results is None else write_card_samples(results)
    method, papers = name_method(run)
    trained = f"its {run['component']} trained with {markdown.escape(method)} by diffusion-grpo ({run['trains_by']})"
    is_whole = (folder / "model_index.json").is_file()  # a checkpoint of full training holds networks only
    usage = write_usage(run, source, pairs[0].prompt if pairs else None, repository is not None, is_whole)
    parts = [
        f"---\n{_make_metadata(run, lora, pairs, details).to_yaml()}\n---",
        f"# {markdown.escape(details.title or source.split('/')[-1])}",
        f"{run['pipeline']} {markdown.code(run['model'])}, {trained} "
        f"for {updates} update{'' if updates == 1 else 's'}.",
        *details.describe_datasets(),
        "## Use",
        *([] if repository else [_local_note(source)]),
        f"```python\n{usage}\n```",
        *_describe_weights(run, best, last),
        "## Rewards",
        _reward_table(run, history, [] if results is None else results.datasets),
        *_show_samples(results, pairs),
        *[f"![{title}]({file})" for title, file in _list_images(folder)],
        "## Reproduce",
        *describe_reproduction(folder, run, repository),
        "## Settings",
        f"```json\n{json.dumps(run['settings'], indent=2)}\n```",
        f"Versions: {', '.join(f'{package} {version}' for package, version in run['versions'].items())}.",
        *_cite(papers),
    ]
    ModelCard("\n\n".join(parts)).save(folder / "README.md")


def _make_metadata(run: dict[str, Any], lora: bool, pairs: list[CardPair], details: CardDetails) -> ModelCardData:
    """Return the metadata of a card, which the Hub reads."""
    found = {
        **_base_model(details.base_model or run["model"], lora),
        **({} if details.license else run.get("license", {})),  # a licence comes with its name and link
        "pipeline_tag": run.get("pipeline_tag"),
    }
    return ModelCardData(
        library_name="diffusers",
        **found | details.make_metadata(),
        tags=[OWN_TAG, "grpo", "reinforcement-learning", *(["lora"] if lora else []), *details.tags],
        widget=make_widget(pairs) or None,
    )


def _describe_weights(run: dict[str, Any], best: int | None, last: int) -> list[str]:
    """Describe which weights these are, and with which adapters and quantised weights they were trained."""
    notes = (_average_note(run["settings"]), _best_note(best, last), _adapters_note(run), _quantization_note(run))
    return [line for note in notes for line in note]


def _is_own_card(path: Path) -> bool:
    """Return whether a card may be written there: there is none yet, or one that this library wrote."""
    if not path.exists():
        return True
    try:
        data = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError):  # its metadata is not valid YAML
        return False
    return OWN_TAG in (data.get("tags") or [])


def _local_note(source: str) -> str:
    return (
        f"The run did not push these weights to the Hub: {markdown.code(source)} is the folder that holds this file. "
        "Give its path, or the name of the repository to which you upload it."
    )


def _show_samples(results: Run | None, pairs: list[CardPair]) -> list[str]:
    """Show the same prompts in the first and the last evaluation, if their files were kept."""
    if results is None or not pairs:
        return []
    samples = f"The first {len(pairs)} samples" if len(pairs) > 1 else "The first sample"  # several may share a prompt
    note = f"{samples} of the evaluations, with the same seeds and the reward beside each image; not hand-picked."
    return ["## Before and after", note, draw_table(results, pairs)]


def _base_model(model: str, lora: bool) -> dict[str, str]:
    """Return the metadata that links the base model, if it is on the Hub."""
    if not names_hub_model(model):
        return {}
    return {"base_model": model, "base_model_relation": "adapter" if lora else "finetune"}


def _cite(papers: dict[str, str]) -> list[str]:
    links = [f"[{name}](https://huggingface.co/papers/{paper})" for name, paper in papers.items()]
    return [f"The method: {', '.join(links)}."] if links else []


def _average_note(settings: dict[str, Any]) -> list[str]:
    """Describe which weights are published, if a moving average was kept."""
    if settings.get("ema_decay") is None:
        return []
    return [
        f"These weights are the moving average of the policy (`ema_decay` {settings['ema_decay']:g}), which the "
        f"evaluations measured. The folder `{POLICY_FOLDER}` contains the policy itself, from which training can "
        "continue."
    ]


def _best_note(best: int | None, last: int) -> list[str]:
    """Describe which weights are published, if they are not the last ones."""
    if best is None or best == last:
        return []
    return [
        f"These are the weights of the best evaluation (`load_best_model_at_end`), {format_updates(best)}; the run "
        f"went on to {last}."
    ]


def _adapters_note(run: dict[str, Any]) -> list[str]:
    """Describe which other LoRAs were active in evaluations, if some were kept."""
    kept = [f"`{adapter}` ({part})" for part, adapters in run.get("kept_adapters", {}).items() for adapter in adapters]
    if not kept:
        return []
    return [
        f"It was trained and measured together with adapters that this folder does not contain: {', '.join(kept)}."
    ]


def _quantization_note(run: dict[str, Any]) -> list[str]:
    """Describe which weights were quantised, if any."""
    found = [f"{markdown.code(part)} ({method})" for part, method in run.get("quantized", {}).items()]
    if not found:
        return []
    return [
        f"It was trained on quantised weights: {', '.join(found)}. The code above loads the model unquantised, which "
        "differs by rounding."
    ]


def _reward_table(run: dict[str, Any], history: list[dict[str, Any]], datasets: list[str]) -> str:
    evaluations = [entry for entry in history if "eval_reward" in entry]
    weights = dict(zip(run["reward_funcs"], run["reward_weights"], strict=True))
    shown = evaluations[:1] + evaluations[-1:] if len(evaluations) > 1 else evaluations
    times = [format_updates(entry["step"]) for entry in shown]
    lines = [f"| {' | '.join(['reward', 'weight', *times])} |", "|---" * (2 + len(shown)) + "|"]
    for name in [*run["reward_funcs"], *run["eval_reward_funcs"]]:
        key = f"eval_rewards/{name}/mean"
        values = [f"{entry[key]:.3f}" if key in entry else "–" for entry in shown]
        lines.append(f"| {' | '.join([markdown.escape(name), str(weights.get(name, 'only evaluated')), *values])} |")
    for dataset in datasets:
        key = f"eval_{dataset}_reward"
        values = [f"{entry[key]:.3f}" if key in entry else "–" for entry in shown]
        lines.append(f"| {' | '.join([f'all, on {markdown.escape(dataset)}', '', *values])} |")
    if shown:
        lines += ["", f"Means over {describe_prompts(run.get('prompts', {}))}."]
    return "\n".join(lines)


def _list_images(folder: Path) -> list[tuple[str, str]]:
    images = [("reward", "curve.png"), ("the same prompts and seeds during the run", "grid.png")]
    return [(title, file) for title, file in images if (folder / file).is_file()]
