"""The model card's samples: the first prompts before and after, as files beside the card."""

import math
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image
from run_folders import make_run

from diffusion_grpo.media.files import write_sound, write_video
from diffusion_grpo.run.card_samples import draw_table, make_widget, write_card_samples
from diffusion_grpo.run.folder import read_run


def test_the_first_prompts_are_shown_before_and_after(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=6, size=(1024, 512)))
    pairs = write_card_samples(run)
    assert [pair.prompt for pair in pairs] == [f'the word "WORD{index}" in red' for index in range(4)]
    files = [sample.image for pair in pairs for sample in (pair.before, pair.after)]
    assert sorted(path.name for path in (run.path / "images").iterdir()) == sorted(Path(file).name for file in files)
    shown = Image.open(run.path / pairs[1].after.image)
    assert shown.size == (512, 256)
    source = Image.open(run.path / "evaluations" / "step-000020" / "0001.png").resize((512, 256))
    assert np.abs(np.asarray(shown, dtype=float) - np.asarray(source, dtype=float)).mean() < 3
    assert make_widget(pairs)[1] == {"text": 'the word "WORD1" in red', "output": {"url": "images/1-after.png"}}


def test_the_table_names_both_evaluations_and_escapes_prompts(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=1))
    for rows in run.samples.values():
        rows[0]["prompt"] = "a|b <i>"
    lines = draw_table(run, write_card_samples(run)).splitlines()
    assert lines[0] == "| prompt | before training | after 20 updates |"
    images = "![before training](images/0-before.png) 0.400 | ![after 20 updates](images/0-after.png) 0.900"
    assert lines[2] == f"| a\\|b \\<i\\> | {images} |"


def test_a_sample_that_no_reward_scored_has_no_number(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=1))
    run.samples[20][0]["reward"] = math.nan
    assert draw_table(run, write_card_samples(run)).endswith("0.400 | ![after 20 updates](images/0-after.png) – |")


def test_videos_and_sounds_lie_behind_their_images(tmp_path):
    path = make_run(tmp_path / "run", prompts=2, eval_every=20)
    for step in (0, 20):
        folder, table = f"step-{step:06d}", path / "evaluations" / f"step-{step:06d}.parquet"
        write_video([Image.new("RGB", (16, 16))] * 3, path / "evaluations" / folder / "0000.mp4", 8)
        write_sound(np.zeros(100), path / "evaluations" / folder / "0001.wav", 8000)
        rows = pyarrow.parquet.read_table(table).to_pylist()
        rows[0]["file"], rows[1]["file"] = f"{folder}/0000.mp4", f"{folder}/0001.wav"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    run = read_run(path)
    pairs = write_card_samples(run)
    assert "[![after 20 updates](images/0-after.png)](images/0-after.mp4)" in draw_table(run, pairs)
    assert (path / "images" / "0-before.mp4").is_file() and (path / "images" / "1-after.wav").is_file()
    assert [entry["output"]["url"] for entry in make_widget(pairs)] == ["images/0-after.mp4"]  # the Hub shows no sound


def test_images_of_an_earlier_card_are_removed(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=1))
    (run.path / "images").mkdir()
    (run.path / "images" / "3-after.png").touch()
    write_card_samples(run)
    assert sorted(path.name for path in (run.path / "images").iterdir()) == ["0-after.png", "0-before.png"]


def test_other_files_beside_the_samples_stay(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=1))
    own = ["photo.png", "0-before.txt", "a0-after.png", "deep/1-after.png"]
    for name in own:
        (run.path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / "images" / name).write_text("mine")
    for _ in range(2):
        write_card_samples(run)
        assert all((run.path / "images" / name).read_text() == "mine" for name in own)


def test_without_kept_samples_there_are_none(tmp_path):
    assert write_card_samples(read_run(make_run(tmp_path / "run", updates=5))) == []
