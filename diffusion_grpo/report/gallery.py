"""Choose the samples that the report shows, as data without HTML: the same prompts and seeds in every evaluation, with
a count of those that got better or worse, and some samples of training.

All files are embedded as data URIs, so that the page needs no other file.
"""

import base64
import io
import math
from pathlib import Path
from typing import Any

import PIL.Image

from ..media.files import compress_sound, shrink_video
from ..media.samples import choose_evenly
from .run_folder import Run, format_updates, key_of

SHOWN = 24  # evaluation prompts shown
EVALUATIONS = 8  # evaluations shown, including the first and the last
ROLLOUTS, ROLLOUT_SAMPLES = 3, 8  # rollouts of training, and samples per rollout
WIDEST = 384  # width in pixels of an embedded image or video
SMALL_VIDEO = 100_000  # bytes up to which a video is embedded as it is


def make_gallery(run: Run) -> dict[str, Any] | None:
    """Return the data of the report's viewer of evaluations; None without two evaluations that left samples."""
    pairs = run.pair_samples()
    if not pairs:
        return None
    changes = [_change(pair) for pair in pairs]
    rewards = [_number(pair[when]["reward"]) for pair in pairs for when in ("before", "after")]
    known = [reward for reward in rewards if reward is not None]
    noticed = 0.01 * (max(known) - min(known)) if known else 0.0
    has_files = lambda pair: all(run.find_file(pair[when].get("image")) for when in ("before", "after"))  # noqa: E731
    shown = [(pair, change) for pair, change in zip(pairs, changes, strict=True) if has_files(pair)][:SHOWN]
    has_media = any(Path(pair["after"].get("file") or "").suffix in (".mp4", ".wav") for pair, _ in shown)
    steps = choose_evenly(sorted(run.samples), 2 if has_media else EVALUATIONS)  # for the size of the page
    rows = {step: {key_of(row): row for row in run.samples[step]} for step in steps}
    cards = [
        {
            "prompt": pair["prompt"],
            "change": change,
            "dataset": pair["after"].get("dataset") if run.datasets else None,
            "input": embed_image(run.find_file(pair["after"].get("input"))),
            "samples": [
                {"step": step, "rewards": [_number(row.get(name)) for name in run.reward_names], **embed(run, row)}
                for step, row in ((step, rows[step].get(key_of(pair["after"]), {})) for step in steps)
                if run.find_file(row.get("image"))
            ],
        }
        for pair, change in shown
    ]
    names = ["before" if step == 0 else format_updates(step) for step in steps]
    if len(steps) == 2 and steps[0] == 0:
        names[1] = "after"
    return {
        "better": sum(change > noticed for change in changes),
        "same": sum(abs(change) <= noticed for change in changes),
        "worse": sum(change < -noticed for change in changes),
        "total": len(pairs),
        "names": dict(zip(steps, names, strict=True)),
        "cards": cards,
        "is_wide": has_media,
    }


def list_rollout_samples(run: Run) -> list[dict[str, Any]]:
    """Return samples of the first, the last and a rollout in between: prompt, reward, files."""
    sections = []
    for step in choose_evenly(sorted(run.rollouts), ROLLOUTS):
        rows = [row for row in run.rollouts[step] if run.find_file(row["image"])][:ROLLOUT_SAMPLES]
        cards = [
            {"prompt": row["prompt"], "reward": row["reward"], "input": embed_image(run.find_file(row.get("input")))}
            | embed(run, row)
            for row in rows
        ]
        sections += [{"when": format_updates(step), "cards": cards}] if cards else []
    return sections


def _change(pair: dict[str, Any]) -> float:
    before, after = _number(pair["before"]["reward"]), _number(pair["after"]["reward"])
    return 0.0 if None in (before, after) else after - before


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def embed(run: Run, row: dict[str, Any]) -> dict[str, str | None]:
    """Embed the image that represents a sample, and the sample itself if it is a video or sound."""
    file = run.find_file(row.get("file"))
    kind = {".mp4": "video", ".wav": "audio"}.get(file.suffix) if file else None
    media = None
    if kind == "audio":
        media = compress_sound(file)
    elif kind == "video":
        media = file.read_bytes() if file.stat().st_size <= SMALL_VIDEO else shrink_video(file, WIDEST)
    image = embed_image(run.find_file(row["image"]))
    return {"image": image, "kind": kind, "media": media and _data_uri(f"{kind}/mp4", media)}


def embed_image(path: Path | None) -> str | None:
    """Embed an image as a data URI: as it is if it is small, otherwise scaled to at most 384 pixels."""
    if path is None:
        return None
    with PIL.Image.open(path) as image:
        if image.width <= WIDEST:
            return _data_uri("image/png", path.read_bytes())
        small = image.convert("RGB")
    small.thumbnail((WIDEST, WIDEST))
    buffer = io.BytesIO()
    small.save(buffer, format="WEBP", quality=88)
    return _data_uri("image/webp", buffer.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
