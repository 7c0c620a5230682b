"""Samples of evaluations as the report shows them: which ones, what is known of each, and how they are embedded."""

import base64
import io

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from run_folders import make_run

from diffusion_grpo.media.files import write_sound, write_video
from diffusion_grpo.report import gallery
from diffusion_grpo.report.gallery import choose_evenly, make_gallery, show_rollouts
from diffusion_grpo.report.page import write_report
from diffusion_grpo.report.run_folder import read_run


def change_rows(run, step, change):
    """Rewrite the table of an evaluation."""
    path = run / "evaluations" / f"step-{step:06d}.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_every_prompt_has_a_sample_of_every_evaluation(tmp_path):
    found = make_gallery(read_run(make_run(tmp_path / "run", prompts=3)))
    assert found["names"] == {0: "before", 10: "after 10 updates", 20: "after 20 updates"}
    assert [card["prompt"] for card in found["cards"]] == [f'the word "WORD{index}" in red' for index in range(3)]
    for index, card in enumerate(found["cards"]):
        assert [sample["step"] for sample in card["samples"]] == [0, 10, 20]
        assert card["samples"][0]["rewards"] == pytest.approx([0.4 + 0.01 * index] * 3)
        assert card["change"] == pytest.approx(0.5)
    images = {sample["image"] for card in found["cards"] for sample in card["samples"]}
    assert len(images) == 9 and not found["is_wide"]


def test_two_evaluations_are_called_before_and_after_and_one_has_no_gallery(tmp_path):
    found = make_gallery(read_run(make_run(tmp_path / "two", prompts=1, eval_every=20)))
    assert found["names"] == {0: "before", 20: "after"}
    assert make_gallery(read_run(make_run(tmp_path / "one", prompts=1, updates=5))) is None


def test_the_first_and_the_last_evaluation_are_always_chosen():
    assert choose_evenly([0, 5], 8) == [0, 5] and choose_evenly([3], 8) == [3] and choose_evenly([], 8) == []
    steps = choose_evenly(list(range(0, 101, 5)), 8)
    assert len(steps) == 8 == len(set(steps)) and (steps[0], steps[-1]) == (0, 100)


def test_of_many_prompts_the_first_are_shown_and_all_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "SHOWN", 2)
    run = make_run(tmp_path / "run", prompts=6, eval_every=20)

    def change(rows):
        rows[3]["reward"], rows[4]["reward"] = -1.0, 2.0

    change_rows(run, 20, change)
    found = make_gallery(read_run(run))
    assert [card["prompt"].split('"')[1] for card in found["cards"]] == ["WORD0", "WORD1"]
    assert found["total"] == 6 and counts(found) == {"better": 5, "same": 0, "worse": 1}


def test_a_change_below_a_hundredth_of_the_range_of_rewards_is_none(tmp_path):
    run = make_run(tmp_path / "run", prompts=3, eval_every=20)
    before = read_run(run).samples[0]
    assert [row["reward"] for row in before] == [0.4] * 3

    def change(rows):
        for row, reward in zip(rows, (0.405, 1.385, 0.385), strict=True):  # a range of 1
            row["reward"] = reward

    change_rows(run, 20, change)
    assert counts(make_gallery(read_run(run))) == {"better": 1, "same": 1, "worse": 1}


def counts(data):
    return {name: data[name] for name in ("better", "same", "worse")}


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_an_unknown_reward_is_none(tmp_path, unknown):
    run = make_run(tmp_path / "run", prompts=2, eval_every=20)

    def change(rows):
        rows[0]["text"], rows[0]["reward"] = unknown, unknown

    change_rows(run, 20, change)
    found = make_gallery(read_run(run))
    assert found["cards"][0]["samples"][1]["rewards"][0] is None and found["cards"][0]["change"] == 0.0
    assert counts(found) == {"better": 1, "same": 1, "worse": 0}


def test_videos_and_sounds_are_embedded_to_be_played(tmp_path):
    run = make_run(tmp_path / "run", prompts=2, eval_every=20)
    for step in (0, 20):
        folder = f"step-{step:06d}"
        write_video([Image.new("RGB", (16, 16), "red")] * 3, run / "evaluations" / folder / "0000.mp4", 8)
        write_sound(np.zeros(4000), run / "evaluations" / folder / "0001.wav", 8000)

        def change(rows, folder=folder):
            rows[0]["file"], rows[1]["file"] = (f"evaluations/{folder}/{name}" for name in ("0000.mp4", "0001.wav"))

        change_rows(run, step, change)
    found = make_gallery(read_run(run))
    video, sound = (card["samples"][1] for card in found["cards"])
    assert found["is_wide"] and (video["kind"], sound["kind"]) == ("video", "audio")
    assert video["media"].startswith("data:video/mp4;base64,") and sound["media"].startswith("data:audio/mp4;base64,")
    shown = Image.open(io.BytesIO(base64.b64decode(video["image"].split(",")[1])))
    assert shown.size == (96, 32)


def test_videos_and_sounds_of_rollouts_are_embedded_too(tmp_path):
    run = make_run(tmp_path / "run", prompts=1, eval_every=20)
    folder = run / "samples" / "step-000000"
    folder.mkdir(parents=True)
    for name in ("0000", "0001", "0002"):
        Image.new("RGB", (16, 16), "red").save(folder / f"{name}.png")
    write_video([Image.new("RGB", (16, 16), "red")] * 3, folder / "0000.mp4", 8)
    write_sound(np.zeros(4000), folder / "0001.wav", 8000)
    files = [f"samples/step-000000/{name}" for name in ("0000.mp4", "0001.wav", "0002.png")]
    rows = [{"prompt": "a", "reward": 0.5, "image": f"{file[:-4]}.png", "file": file} for file in files]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), run / "samples" / "step-000000.parquet")
    [rollout] = show_rollouts(read_run(run))
    assert [card["kind"] for card in rollout["cards"]] == ["video", "audio", None]
    kinds = [card["media"] and card["media"].split(";")[0] for card in rollout["cards"]]
    assert kinds == ["data:video/mp4", "data:audio/mp4", None]
    page = write_report(run).read_text()
    assert all(card["media"] in page for card in rollout["cards"][:2])


def test_datasets_with_the_same_prompts_are_not_mixed(tmp_path):
    path = make_run(tmp_path / "run", prompts=2)

    def change(rows):
        for row, dataset in zip(rows, ("plain", "hard"), strict=True):
            row |= {"dataset": dataset, "prompt": "a fox", "seed": 1}
        rows[1]["reward"] = 1 - rows[1]["reward"]  # falls as much as that of the other rises

    for step in (0, 10, 20):
        change_rows(path, step, change)
    run = read_run(path)
    found = make_gallery(run)
    assert counts(found) == {"better": 1, "same": 0, "worse": 1}
    assert [card["change"] for card in found["cards"]] == pytest.approx([0.5, -0.5])
    assert [card["dataset"] for card in found["cards"]] == ["plain", "hard"]
    images = {sample["image"] for card in found["cards"] for sample in card["samples"]}
    assert len(images) == 6
