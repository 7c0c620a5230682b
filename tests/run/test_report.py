"""Reports of run folders written by hand in the trainer's format: no model is needed."""

import html
import json
import re
import sys
from html.parser import HTMLParser

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image, ImageDraw

from diffusion_grpo.run.folder import describe_change, read_run
from diffusion_grpo.run.report import write_report, write_summary

pytestmark = pytest.mark.plots

REWARDS = ["text", "color"]
JUDGE = "tesseract"


def make_run(
    path, updates=20, eval_every=10, prompts=12, start=0.4, stop=0.9, size=(96, 32), baselines=True, shared=0
):
    """A run whose held-out rewards rise on a straight line from `start` to `stop`."""
    info = {
        "model": "tiny",
        "pipeline": "StableDiffusion3Pipeline",
        "component": "transformer",
        "reward_funcs": REWARDS,
        "eval_reward_funcs": [JUDGE],
        "reward_weights": [0.6, 0.4],
        "trains_by": "LoRA rank 16",
        "settings": {"learning_rate": 0.002, "num_inference_steps": 8, "sde_window": [0, 4]},
        "versions": {"diffusers": "0.42.1"},
        "prompts": {"train": 608, "eval": prompts, "eval_in_train": shared},
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(info))
    history = []
    for step in range(updates + 1):
        level = start + (stop - start) * step / max(updates, 1)
        if step:
            history.append(train_entry(step, level))
        if step % eval_every == 0:
            history.append(eval_entry(step, level))
            write_evaluation(path, step, level, prompts, size)
    history.append({"step": updates, "train_runtime": 123.0})
    (path / "trainer_state.json").write_text(json.dumps({"global_step": updates, "log_history": history}))
    if baselines:
        cell = {"mean": 0.7, "std_error": 0.03}
        rewards = dict.fromkeys([*REWARDS, JUDGE], cell)
        (path / "baselines.json").write_text(json.dumps([{"name": "guidance 2", "rewards": rewards, "reward": cell}]))
    return path


def train_entry(step, level):
    stages = {"time/rollout": 2.0, "time/reward": 1.0, "time/update": 3.0}
    rewards = {f"rewards/{name}/mean": level - 0.05 for name in REWARDS}
    diagnostics = {"ratio/max_error": 0.0, "frac_reward_zero_std": 0.1, "loss": 0.01, "samples_per_second": 40.0}
    return {"step": step, "reward": level - 0.05, "reward_std": 0.2, **rewards, **stages, **diagnostics}


def eval_entry(step, level):
    entry = {"step": step, "eval_reward": level, "eval_reward_std_error": 0.02}
    for name in [*REWARDS, JUDGE]:
        entry |= {f"eval_rewards/{name}/mean": level, f"eval_rewards/{name}/std_error": 0.03}
    return entry


def write_evaluation(path, step, level, prompts, size):
    folder = path / "evaluations" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    rows = []
    for index in range(prompts):
        image = Image.new("RGB", size, (250, 249, 247))
        ImageDraw.Draw(image).text((8, 8), f"WORD{index} {step}", fill=(200, 40, 40))
        image.save(folder / f"{index:04d}.png")
        rewards = dict.fromkeys([*REWARDS, JUDGE], level + 0.01 * (index % 3))
        row = {"step": step, "prompt": f'the word "WORD{index}" in red', "seed": index, "reward": level}
        rows.append({**row, **rewards, "image": f"step-{step:06d}/{index:04d}.png"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder.with_suffix(".parquet"))


class Links(HTMLParser):
    """Every address a page would load."""

    def __init__(self, page):
        super().__init__()
        self.sources = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def test_summary_has_the_promised_keys_and_the_first_and_last_evaluation(tmp_path):
    summary = write_summary(make_run(tmp_path / "run"))
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == {
        "evaluation_prompts": 12,
        "evaluation_prompts_in_training": 0,
        "first_evaluation_after": 0,
        "last_evaluation_after": 20,
        "reward_before": pytest.approx(0.4),
        "reward_first": pytest.approx(0.4),
        "reward_after": pytest.approx(0.9),
        "standard_error": 0.02,
        "rewards": {
            name: {
                "before": pytest.approx(0.4),
                "first": pytest.approx(0.4),
                "after": pytest.approx(0.9),
                "standard_error": 0.03,
            }
            for name in ["text", "color", "tesseract"]
        },
        "seconds": 123.0,
        "samples_per_second": pytest.approx(40.0),
        "updates": 20,
    }


def test_report_loads_nothing_from_outside(tmp_path):
    page = write_report(make_run(tmp_path / "run")).read_text()
    sources = Links(page).sources
    assert len(sources) > 20
    assert all(source.startswith("data:") for source in sources)
    assert "url(" not in page and "<script" not in page


def test_report_says_what_was_gained(tmp_path):
    page = write_report(make_run(tmp_path / "run", start=0.4, stop=0.9)).read_text()
    assert "0.400 → 0.900" in page
    assert re.search(r"83 %</b><span>of what was missing", page)  # 0.5 of 0.6
    assert "12 held-out prompts, none of which is trained on" in page and "guidance 2" in page
    assert "12 held-out samples 12 got a higher reward than before, 0 the same, 0 a lower one" in page


def test_report_says_when_nothing_was_learned(tmp_path):
    page = write_report(make_run(tmp_path / "flat", start=0.5, stop=0.51)).read_text()
    assert "did not change beyond its noise" in page
    page = write_report(make_run(tmp_path / "worse", start=0.6, stop=0.3)).read_text()
    assert "fell on held-out prompts" in page


def test_prompts_are_escaped(tmp_path):
    run = make_run(tmp_path / "run", prompts=1)
    for table in (run / "evaluations").glob("*.parquet"):
        rows = pyarrow.parquet.read_table(table).to_pylist()
        rows[0]["prompt"] = "<script>alert(1)</script>"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    assert "<script>" not in write_report(run).read_text()


def test_a_run_without_evaluations_still_has_a_report(tmp_path):
    run = make_run(tmp_path / "run", baselines=False)
    state = json.loads((run / "trainer_state.json").read_text())
    history = [entry for entry in state["log_history"] if "eval_reward" not in entry]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    page = write_report(run).read_text()
    assert "nothing can be said about what was learned" in page
    assert write_summary(run)["reward_after"] is None


def test_a_run_that_has_saved_nothing_yet_is_read_from_its_tables(tmp_path):
    run = make_run(tmp_path / "run", stop=0.8)
    (run / "trainer_state.json").unlink()
    summary = write_summary(run)
    assert summary["updates"] == 20
    assert summary["reward_before"] == pytest.approx(0.4) and summary["reward_after"] == pytest.approx(0.8)
    assert summary["rewards"]["text"]["after"] == pytest.approx(0.81)
    assert "0.400 → 0.800" in write_report(run).read_text()


def test_a_running_training_is_read_from_its_newest_checkpoint(tmp_path):
    run = make_run(tmp_path / "run")
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    (run / "trainer_state.json").unlink()
    for step in (5, 10):
        checkpoint = run / f"checkpoint-{step}"
        checkpoint.mkdir()
        part = [entry for entry in history if entry["step"] <= step and "train_runtime" not in entry]
        (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": part}))
    summary = write_summary(run)
    assert summary["updates"] == 10
    assert summary["seconds"] == pytest.approx(60.0)  # ten updates of 2 + 1 + 3 seconds


def test_pictures_that_were_not_kept_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", prompts=6)
    for step in (0, 10, 20):
        (run / "evaluations" / f"step-{step:06d}" / "0003.png").unlink()
    page = write_report(run).read_text()
    assert "WORD2" in page and "WORD3" not in page


def test_large_pictures_are_embedded_small(tmp_path):
    run = make_run(tmp_path / "run", size=(1024, 1024), prompts=2)
    page = write_report(run).read_text()
    assert "data:image/webp" in page
    assert len(page) < 1_500_000


def test_experiment_is_shown_with_its_command(tmp_path):
    experiment = {
        "title": "Spelling alone",
        "note": "The colour reward was left out.",
        "columns": ["text", "color"],
        "rows": [{"name": "before", "values": [0.4, 0.42]}, {"name": "after", "values": [0.97, None]}],
        "command": "diffusion-grpo train x.yaml",
        "machine": "two cores",
    }
    (tmp_path / "experiment.json").write_text(json.dumps(experiment))
    page = write_report(make_run(tmp_path / "run"), tmp_path / "experiment.json").read_text()
    assert "Spelling alone" in page and "0.970" in page and "diffusion-grpo train x.yaml" in page


def test_the_same_run_gives_the_same_page(tmp_path):
    run = make_run(tmp_path / "run")
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run.json"):
        read_run(tmp_path)


def keep_evaluations(run, steps):
    """Leaves only these evaluations in a run, as one without `eval_on_start` has."""
    state = json.loads((run / "trainer_state.json").read_text())
    history = [e for e in state["log_history"] if "eval_reward" not in e or e["step"] in steps]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for table in (run / "evaluations").glob("*.parquet"):
        if int(table.stem.split("-")[1]) not in steps:
            table.unlink()


def test_what_was_measured_after_updates_is_not_called_before(tmp_path):
    run = make_run(tmp_path / "run")
    keep_evaluations(run, (10, 20))
    summary = write_summary(run)
    assert summary["reward_before"] is None and summary["rewards"]["text"]["before"] is None
    assert summary["reward_first"] == pytest.approx(0.65) and summary["first_evaluation_after"] == 10
    page = write_report(run).read_text()
    assert "reward after 10 updates and after 20 updates" in page and "Before and after" not in page
    assert "got a higher reward than after 10 updates" in page and "<span>after 10 updates</span>" in page
    assert describe_change(read_run(run), "reward") == "0.650 ± 0.020 after 10 updates, 0.900 ± 0.020 after 20 updates"


@pytest.mark.parametrize(("step", "when"), [(0, "before training"), (20, "after 20 updates")])
def test_one_evaluation_shows_one_number(tmp_path, step, when):
    run = make_run(tmp_path / "run", baselines=False)
    keep_evaluations(run, (step,))
    value = "0.400" if step == 0 else "0.900"
    assert describe_change(read_run(run), "reward") == f"{value} ± 0.020 {when}"
    page, summary = write_report(run).read_text(), write_summary(run)
    assert f"<b>{value}</b><span>held-out reward {when}" in page and "→" not in page
    assert [summary["reward_before"], summary["reward_after"]].count(None) == 1 and summary["reward_first"] is None


@pytest.mark.parametrize(("shared", "words"), [(12, "all of which are"), (5, "5 of which are"), (None, None)])
def test_the_report_claims_no_more_than_was_compared(tmp_path, shared, words):
    page = write_report(make_run(tmp_path / "run", shared=shared)).read_text()
    assert "held-out" not in page and "come from other prompts" not in page
    assert (
        (f"12 evaluation prompts, {words} trained on too" in page) if words else ("which" not in page.split("To")[0])
    )


def test_no_change_is_claimed_within_the_standard_error(tmp_path):
    run = make_run(tmp_path / "run", start=0.9512, stop=0.9508)  # both print as 0.951
    state = json.loads((run / "trainer_state.json").read_text())
    for errors in (0.0, None):
        for entry in state["log_history"]:
            for key in [key for key in entry if key.endswith("std_error")]:
                entry[key] = errors
        (run / "trainer_state.json").write_text(json.dumps(state))
        page = write_report(run).read_text()
        assert "fell on" not in page and "of what was missing" not in page
        assert ("did not change beyond its noise: 0.951, then 0.951" if errors == 0 else "noise is unknown") in page


def test_kept_samples_of_training_are_shown(tmp_path):
    run = make_run(tmp_path / "run")
    for step in (0, 10):
        folder = run / "samples" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (96, 32), "red").save(folder / "0000.png")
        rows = [{"prompt": f"drawn {step}", "reward": 0.25, "image": f"{folder.name}/0000.png"}]
        rows.append({"prompt": "not kept", "reward": 0.75, "image": None})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder.with_suffix(".parquet"))
    page = write_report(run).read_text()
    assert "The first rollout" in page and "After 10 updates" in page
    assert "drawn 0" in page and "drawn 10" in page and "not kept" not in page


@pytest.mark.parametrize("name", ["a|b <i>x", "$_{a", "<script>alert(1)"])
def test_names_and_paths_stand_for_themselves(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "JUDGE", name)
    run = make_run(tmp_path / "run", prompts=2)
    info = json.loads((run / "run.json").read_text())
    info["settings"]["validation_prompts"] = ["<b>bold</b>"]
    (run / "run.json").write_text(json.dumps(info | {"model": "<u>model</u>"}))
    page = write_report(run).read_text()
    assert html.escape(name) in page and "&lt;u&gt;model" in page and "&lt;b&gt;bold" in page
    assert not any(tag in page for tag in ("<script>alert", "<i>x", "<b>bold", "<u>model"))
