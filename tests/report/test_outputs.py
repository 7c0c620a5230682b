"""What a run with videos or sound leaves: files that play, tables that name them, a page and trackers that show."""

import base64
import io
import re

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from tiny_runs import brightness, finished_run, first_frame_brightness, list_tags, trainer_for

from diffusion_grpo.media.files import read_sound, read_video

VIDEO = {"name": "wan", "rewards": first_frame_brightness, "num_inference_steps": 3, "fps": 8.0}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}


def table_of(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def embedded(page, kind):
    """The files of a kind that a page holds."""
    return [io.BytesIO(base64.b64decode(data)) for data in re.findall(f'src="data:{kind}/mp4;base64,([^"]+)"', page)]


def test_videos_of_evaluations_play_and_are_in_the_report(tmp_path):
    trainer_for(tmp_path, **VIDEO, **EVALUATED, max_steps=2, save_samples_steps=2, best_of_n=2).train()
    rows = table_of(tmp_path / "samples" / "step-000000.parquet")
    assert len(rows) == 16 and all(row["file"].endswith(".mp4") for row in rows)  # also those not trained on
    assert len(read_video(tmp_path / rows[-1]["file"])) == 5
    rows = table_of(tmp_path / "evaluations" / "step-000002.parquet")
    assert [row["file"] for row in rows] == [f"evaluations/step-000002/000{place}.mp4" for place in (0, 1)]
    for row in rows:
        frames = read_video(tmp_path / row["file"])
        first = np.asarray(Image.open(tmp_path / row["image"])).astype(float)
        assert len(frames) == 5 and np.abs(np.asarray(frames[0]) - first).mean() < 20  # the codec rounds noise
    page = (tmp_path / "report.html").read_text()
    videos = embedded(page, "video")
    # two prompts in the first and the last evaluation, and the first eight samples of the rollout
    assert len(videos) == page.count("<video") == 4 + 8
    assert all(len(read_video(video)) == 5 for video in videos)
    assert "WEBP" not in page and not list(tmp_path.rglob("*.webp")) and Image.open(tmp_path / "grid.png").width > 64


def test_videos_with_sound_play_both(tmp_path):
    settings = VIDEO | {"name": "ltx2", "fps": None}
    trainer_for(tmp_path, **settings, **EVALUATED, max_steps=1).train()
    for row in table_of(tmp_path / "evaluations" / "step-000001.parquet"):
        assert len(read_video(tmp_path / row["file"])) == 5
        sound, rate = read_sound(tmp_path / row["file"])
        assert rate == 24000 and len(sound) == 2 and np.abs(sound).max() > 0.01
    videos = embedded((tmp_path / "report.html").read_text(), "video")
    assert len(videos) > 4 and all(read_sound(video)[1] == 24000 for video in videos)


def test_sound_of_evaluations_and_rollouts_plays(tmp_path):
    settings = {"name": "stable_audio", "rewards": loudness, "max_steps": 1, "save_samples_steps": 1}
    trainer = finished_run(tmp_path, **settings, **EVALUATED, report_to="tensorboard")
    for row in table_of(tmp_path / "evaluations" / "step-000001.parquet"):
        assert row["file"].endswith(".wav") and Image.open(tmp_path / row["image"]).size == (256, 128)
        sound, rate = read_sound(tmp_path / row["file"])
        assert rate == trainer.pipe.vae.config.sampling_rate
        assert np.abs(sound).mean() == pytest.approx(row["loudness"], abs=1e-3)
    rows = table_of(tmp_path / "samples" / "step-000000.parquet")
    assert len(rows) == 8 and all((tmp_path / row["file"]).is_file() for row in rows)
    page = (tmp_path / "report.html").read_text()
    sounds = embedded(page, "audio")
    assert len(sounds) == page.count("<audio") == 4 + len(rows) and all(len(read_sound(sound)[0]) for sound in sounds)
    assert {"samples/0000", "samples/0001"} <= set(list_tags(tmp_path, "audio"))


def loudness(completions, sampling_rate, **columns):
    """Mean size of a waveform, as a player cuts it off."""
    assert sampling_rate == 16  # the tiny autoencoder's
    return [float(sound.float().clamp(-1, 1).abs().mean()) for sound in completions]


def test_samples_of_rollouts_are_saved_every_n_updates(tmp_path):
    """Where a rollout lasts for three updates, the first one at or after each multiple of two is saved."""
    settings = {"steps_per_generation": 6, "max_steps": 4, "save_samples_steps": 2}
    trainer_for(tmp_path, **settings, log_completions=False).train()
    saved = sorted(path.name for path in (tmp_path / "samples").iterdir())
    names = ["step-000000", "step-000003"]
    assert saved == sorted([*names, *(f"{name}.parquet" for name in names)])
    for name in names:
        rows = table_of(tmp_path / "samples" / f"{name}.parquet")
        # named by their place in the generation, whose updates come in an order of their own
        assert sorted(row["file"] for row in rows) == [f"samples/{name}/{place:04d}.png" for place in range(len(rows))]
        for row in rows:  # the image is the one that was scored
            [value] = brightness([Image.open(tmp_path / row["file"])])
            assert row["brightness"] == pytest.approx(value) and "advantage" in row and row["prompt"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"log_samples_steps": 2}, {0: 3, 2: 3, 3: 3}), ({"log_completions": False}, {})],
    ids=str,
)
def test_some_samples_are_kept_and_shown_without_an_evaluation(tmp_path, settings, expected):
    """Of the first rollout, of the last, and of one every N updates."""
    settings = settings | {"max_steps": 4, "num_inference_steps": 2, "watch_rewards": None}
    trainer_for(tmp_path, num_completions_to_log=3, **settings).train()
    kept = {int(path.name[5:]): len(list(path.iterdir())) for path in (tmp_path / "samples").glob("step-*/")}
    assert kept == expected
    for step, count in expected.items():
        rows = table_of(tmp_path / "samples" / f"step-{step:06d}.parquet")
        files = [f"samples/step-{step:06d}/{place:04d}.png" for place in range(count)]
        assert sorted(row["file"] for row in rows if row["file"]) == files
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="pixel"') == sum(min(count, 8) for count in expected.values())
