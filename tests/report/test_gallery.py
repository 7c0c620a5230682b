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
from diffusion_grpo.report.gallery import list_rollout_samples, make_gallery
from diffusion_grpo.report.page import write_report
from diffusion_grpo.report.run_folder import read_run


def counts(data):
    return [data[name] for name in ("better", "same", "worse")]


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
    run = make_run(tmp_path / "two", prompts=2, eval_every=20, size=(1024, 1024))
    (run / "evaluations" / "step-000020" / "0001.png").unlink()  # which was not kept
    found = make_gallery(read_run(run))
    assert found["names"] == {0: "before", 20: "after"} and len(found["cards"]) == 1
    assert found["cards"][0]["samples"][0]["image"].startswith("data:image/webp")  # large images are embedded small
    assert make_gallery(read_run(make_run(tmp_path / "one", prompts=1, updates=5))) is None


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((0.9, 0.9, -1.0, 2.0), [3, 0, 1]),
        ((0.405, 1.385, 0.385, 0.5), [2, 1, 1]),  # less than a hundredth of the range, which is 1, is no change
        ((None, 0.9, 0.9, 0.9), [3, 1, 0]),
        ((float("nan"), 0.9, 0.9, 0.9), [3, 1, 0]),
    ],
)
def test_of_many_prompts_the_first_are_shown_and_all_are_counted(tmp_path, monkeypatch, after, expected):
    monkeypatch.setattr(gallery, "SHOWN", 2)
    run = read_run(make_run(tmp_path / "run", prompts=4, eval_every=20))
    for row, reward in zip(run.samples[20], after, strict=True):
        row["reward"] = row["text"] = reward
    found = make_gallery(run)
    assert [card["prompt"].split('"')[1] for card in found["cards"]] == ["WORD0", "WORD1"]
    assert found["total"] == 4 and counts(found) == expected
    is_known = after[0] is not None and after[0] == after[0]
    assert found["cards"][0]["samples"][1]["rewards"][0] == (after[0] if is_known else None)
    assert found["cards"][0]["change"] == pytest.approx(after[0] - 0.4 if is_known else 0.0)


def test_videos_and_sounds_are_embedded_to_be_played(tmp_path):
    path = make_run(tmp_path / "run", prompts=2, eval_every=20)
    folder = path / "samples" / "step-000000"
    folder.mkdir(parents=True)
    for name in ("0000", "0001", "0002"):
        Image.new("RGB", (16, 16), "red").save(folder / f"{name}.png")
    write_video([Image.new("RGB", (16, 16), "red")] * 3, folder / "0000.mp4", 8)
    write_sound(np.zeros(4000), folder / "0001.wav", 8000)
    files = [f"samples/step-000000/{name}" for name in ("0000.mp4", "0001.wav", "0002.png")]
    rows = [{"prompt": "a", "reward": 0.5, "image": f"{file[:-4]}.png", "file": file} for file in files]
    rows.append({"prompt": "not kept", "reward": 0.5, "image": None, "file": None})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder.with_suffix(".parquet"))
    run = read_run(path)
    for row, file in [pair for step in (0, 20) for pair in zip(run.samples[step], files[:2], strict=True)]:
        row["file"] = file
    found, [rollout] = make_gallery(run), list_rollout_samples(run)
    assert (
        found["is_wide"] and rollout["when"] == "before training" and {c["prompt"] for c in rollout["cards"]} == {"a"}
    )
    for cards in ([card["samples"][1] for card in found["cards"]] + [{"kind": None, "media": None}], rollout["cards"]):
        assert [card["kind"] for card in cards] == ["video", "audio", None]
        media = [card["media"] and card["media"].split(",")[0] for card in cards]
        assert media == ["data:video/mp4;base64", "data:audio/mp4;base64", None]
    image = found["cards"][0]["samples"][1]["image"]
    assert Image.open(io.BytesIO(base64.b64decode(image.split(",")[1]))).size == (96, 32)
    page = write_report(path).read_text()
    assert all(card["media"] in page for card in rollout["cards"][:2])


def test_datasets_with_the_same_prompts_are_not_mixed(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=2))
    for rows in run.samples.values():
        for row, dataset in zip(rows, ("plain", "hard"), strict=True):
            row |= {"dataset": dataset, "prompt": "a fox", "seed": 1}
        rows[1]["reward"] = 1 - rows[1]["reward"]  # falls as much as that of the other rises
    found = make_gallery(run)
    assert counts(found) == [1, 0, 1]
    assert [card["change"] for card in found["cards"]] == pytest.approx([0.5, -0.5])
    assert [card["dataset"] for card in found["cards"]] == ["plain", "hard"]
    assert len({sample["image"] for card in found["cards"] for sample in card["samples"]}) == 6
