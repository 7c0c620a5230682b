"""Samples for the report: the same prompts and seeds in every evaluation, and some samples of training.

All files are embedded as data URIs, so that the page needs no other file.
"""

import base64
import io
import math
from pathlib import Path
from typing import Any

import PIL.Image

from ..run.folder import Run, format_updates

SHOWN = 24  # evaluation prompts shown
EVALUATIONS = 8  # evaluations shown, including the first and the last
ROLLOUTS, ROLLOUT_SAMPLES = 3, 8  # rollouts of training, and samples per rollout
WIDEST = 384  # width in pixels of an embedded image or video
SMALL_VIDEO = 100_000  # bytes up to which a video is embedded as it is
MOST_BYTES = 12_000_000  # for evaluations between first and last; browsers can handle a page of this size
KINDS = {".mp4": "video", ".wav": "audio"}


def pair_samples(run: Run) -> list[dict[str, Any]]:
    """Pair samples of the first and the last evaluation: same dataset, same prompt, same seed."""
    if len(run.samples) < 2:
        return []
    first, last = run.samples[min(run.samples)], run.samples[max(run.samples)]
    before = _index_rows(first)
    pairs = [(before.get(_make_key(row)), row) for row in last]
    return [{"prompt": row["prompt"], "before": found, "after": row} for found, row in pairs if found is not None]


def _make_key(row: dict[str, Any]) -> tuple[str | None, str, int]:
    """Return the key that a sample shares across evaluations; samples of earlier versions name no dataset."""
    return row.get("dataset"), row["prompt"], row["seed"]


def _index_rows(rows: list[dict[str, Any]]) -> dict[tuple[str | None, str, int], dict[str, Any]]:
    """Return the rows of an evaluation by the keys that samples share across evaluations."""
    return {_make_key(row): row for row in rows}


def make_gallery(run: Run) -> dict[str, Any] | None:
    """Return the data of the report's viewer of evaluations; None without two evaluations that left samples."""
    pairs = pair_samples(run)
    if not pairs:
        return None
    changes = [_change(pair) for pair in pairs]
    rewards = [pair[when]["reward"] for pair in pairs for when in ("before", "after")]
    known = [reward for reward in rewards if _is_number(reward)]
    noticed = 0.01 * (max(known) - min(known)) if known else 0.0
    counts = {
        "better": sum(change > noticed for change in changes),
        "same": sum(abs(change) <= noticed for change in changes),
        "worse": sum(change < -noticed for change in changes),
    }
    shown = [(pair, change) for pair, change in zip(pairs, changes) if _has_images(run, pair)]
    steps = choose_steps(sorted(run.samples))
    cards = _make_cards(run, shown[:SHOWN], steps)
    names = ["before" if step == 0 else format_updates(step) for step in steps]
    if len(steps) == 2 and steps[0] == 0:
        names[1] = "after"
    chosen = [{"step": step, "name": name} for step, name in zip(steps, names, strict=True)]
    return {
        "counts": counts,
        "total": len(pairs),
        "steps": chosen,
        "names": dict(zip(steps, names)),
        "cards": cards,
        "is_wide": any(sample["kind"] for card in cards for sample in card["samples"]),
    }


def choose_steps(steps: list[int]) -> list[int]:
    """Choose evenly spaced evaluations, including the first and the last."""
    count = min(EVALUATIONS, len(steps))
    return [steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)]


def _change(pair: dict[str, Any]) -> float:
    before, after = pair["before"]["reward"], pair["after"]["reward"]
    return after - before if _is_number(before) and _is_number(after) else 0.0


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _has_images(run: Run, pair: dict[str, Any]) -> bool:
    """Return whether both images of a pair were kept; a run saves only the first few."""
    files = [pair["before"].get("image"), pair["after"].get("image")]
    return all(find_file(run, file) is not None for file in files)


def find_file(run: Run, file: str | None) -> Path | None:
    """Find a sample's file; its recorded path is relative to the run's folder or to its evaluations folder."""
    for folder in (run.path, run.path / "evaluations") if file else ():
        if (folder / file).is_file():
            return folder / file
    return None


def _make_cards(run: Run, shown: list[tuple[dict[str, Any], float]], steps: list[int]) -> list[dict[str, Any]]:
    """Return a card per prompt with its samples at all `steps`, within the page's size limit."""
    rows = {step: _index_rows(run.samples[step]) for step in steps}
    budget = MOST_BYTES
    cards = []
    for pair, change in shown:
        samples = []
        for step in steps:
            row = rows[step].get(_make_key(pair["after"]))
            is_end = step in (steps[0], steps[-1])
            if row is None or not row.get("image") or find_file(run, row["image"]) is None or not (is_end or budget):
                continue
            sample = _make_sample(run, step, row)
            samples.append(sample)
            size = 0 if is_end else len(sample["image"]) + len(sample["media"] or "")
            budget = max(0, budget - size)
        card = {"prompt": pair["prompt"], "change": change, "samples": samples}
        dataset = pair["after"].get("dataset")
        card |= {"input": _embed_input(run.path, pair["after"]), "dataset": dataset if run.datasets else None}
        cards.append(card)
    return cards


def _make_sample(run: Run, step: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return the template's data of one sample; unknown rewards are None."""
    rewards = [row.get(name) for name in run.reward_names]
    rewards = [reward if _is_number(reward) else None for reward in rewards]
    return {"step": step, "rewards": rewards, **embed_sample(run, row)}


def embed_sample(run: Run, sample: dict[str, Any]) -> dict[str, str | None]:
    """Embed a sample's image, and the file of a video or sound, as data URIs; also return its kind."""
    return _embed(find_file(run, sample["image"]), find_file(run, sample.get("file") or sample["image"]))


def _embed(image: Path, file: Path | None) -> dict[str, str | None]:
    """Embed the image that represents a sample, and the sample itself if it is a video or sound."""
    kind = None if file is None or not file.is_file() else KINDS.get(file.suffix)
    return {"image": embed_image(image), "kind": kind, "media": embed_media(file) if kind else None}


def _embed_input(folder: Path, row: dict[str, Any]) -> str | None:
    """Embed the image that a sample was made from, if one was kept."""
    path = folder / row["input"] if row.get("input") else None
    return None if path is None or not path.is_file() else embed_image(path)


def show_rollouts(run: Run) -> list[dict[str, Any]]:
    """Return samples of the first, the last and a few rollouts in between: prompt, reward, files."""
    folder, steps = run.path / "samples", sorted(run.rollouts)
    count = min(ROLLOUTS, len(steps))
    chosen = dict.fromkeys(steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count))
    found = []
    for step in chosen:
        rows = [row for row in run.rollouts[step] if (folder / row["image"]).is_file()][:ROLLOUT_SAMPLES]
        files = [(folder / row["image"], folder / (row.get("file") or row["image"])) for row in rows]
        cards = [
            {"prompt": row["prompt"], "reward": row["reward"], "input": _embed_input(folder, row), **_embed(*own)}
            for row, own in zip(rows, files, strict=True)
        ]
        found += [{"when": format_updates(step), "cards": cards}] if cards else []
    return found


def embed_media(path: Path) -> str:
    """Embed a small video as it is, or a compressed larger one (at most 384 pixels) or sound, as a data URI."""
    from ..media.files import compress_sound, shrink_video

    if path.suffix == ".wav":
        return "data:audio/mp4;base64," + base64.b64encode(compress_sound(path)).decode()
    content = path.read_bytes() if path.stat().st_size <= SMALL_VIDEO else shrink_video(path, WIDEST)
    return "data:video/mp4;base64," + base64.b64encode(content).decode()


def embed_image(path: Path) -> str:
    """Embed an image as a data URI: as it is if it is small, otherwise scaled to at most 384 pixels."""
    with PIL.Image.open(path) as image:
        if image.width <= WIDEST:
            return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
        small = image.convert("RGB")
        small.thumbnail((WIDEST, WIDEST))
    buffer = io.BytesIO()
    small.save(buffer, format="WEBP", quality=88)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
