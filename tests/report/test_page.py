"""Reports of run folders written by hand in the trainer's format: no model is needed."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from run_folders import make_run

from diffusion_grpo.report.page import write_report, write_summary
from diffusion_grpo.report.run_folder import describe_change, read_run

pytestmark = pytest.mark.plots


class Links(HTMLParser):
    """Every address a page would load."""

    def __init__(self, page):
        super().__init__()
        self.sources = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_loads_nothing_lets_only_its_own_script_run_and_is_written_the_same_again(tmp_path):
    run = make_run(tmp_path / "run")
    page = write_report(run).read_text()
    sources = Links(page).sources
    assert len(sources) > 20 and all(source.startswith("data:") for source in sources)
    assert "url(" not in page and page.count("<script") == 1 and "<script>" in page and "import(" not in page
    assert not re.search("fetch|XMLHttpRequest|WebSocket|sendBeacon|importScripts|createElement|innerHTML", page)
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall('Content-Security-Policy" content="([^"]+)"', page)
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy and " onclick=" not in page
    assert write_report(run).read_text() == page


def test_report_says_what_was_gained(tmp_path):
    page = write_report(make_run(tmp_path / "run", start=0.4, stop=0.9)).read_text()
    assert "0.400 → 0.900" in page
    assert "12 held-out prompts, none of which is trained on" in page and "guidance 2" in page
    assert "12 held-out samples 12 got a higher reward than before, 0 the same, 0 a lower one" in page


def test_report_says_when_nothing_was_learned(tmp_path):
    page = write_report(make_run(tmp_path / "flat", start=0.5, stop=0.51)).read_text()
    assert "did not change beyond its noise" in page
    page = write_report(make_run(tmp_path / "worse", start=0.6, stop=0.3)).read_text()
    assert "fell on held-out prompts" in page


def test_groups_of_equal_rewards_stand_out_however_many_updates_a_rollout_serves(tmp_path):
    run = make_run(tmp_path / "run")
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    for entry in history:
        if entry["step"] == 10 and "reward" in entry:
            entry["frac_reward_zero_std"] = 1.0
        elif "reward" in entry:  # an update on a rollout that was made before
            del entry["reward"], entry["frac_reward_zero_std"]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert "more than half of the groups had equal rewards" in write_report(run).read_text()


def test_a_run_without_evaluations_still_has_a_report(tmp_path):
    run = make_run(tmp_path / "run", baselines=False)
    state = json.loads((run / "trainer_state.json").read_text())
    history = [entry for entry in state["log_history"] if "eval_reward" not in entry]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    page = write_report(run).read_text()
    assert "nothing can be said about what was learned" in page
    assert write_summary(run)["reward_after"] is None


def test_images_that_were_not_kept_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", prompts=6)
    for step in (0, 10, 20):
        (run / "evaluations" / f"step-{step:06d}" / "0003.png").unlink()
    page = write_report(run).read_text()
    assert "WORD2" in page and "WORD3" not in page


def test_large_images_are_embedded_small(tmp_path):
    run = make_run(tmp_path / "run", size=(1024, 1024), prompts=2)
    page = write_report(run).read_text()
    assert "data:image/webp" in page
    assert len(page) < 1_500_000


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
        assert "fell on" not in page
        assert ("did not change beyond its noise: 0.951, then 0.951" if errors == 0 else "noise is unknown") in page


def test_kept_samples_of_training_are_shown(tmp_path):
    run = make_run(tmp_path / "run")
    for step in (0, 10):
        folder = run / "samples" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (96, 32), "red").save(folder / "0000.png")
        rows = [{"prompt": f"drawn {step}", "reward": 0.25, "image": f"samples/{folder.name}/0000.png"}]
        rows.append({"prompt": "not kept", "reward": 0.75, "image": None})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder.with_suffix(".parquet"))
    page = write_report(run).read_text()
    assert "The first rollout" in page and "After 10 updates" in page
    assert "drawn 0" in page and "drawn 10" in page and "not kept" not in page


def test_names_prompts_and_paths_stand_for_themselves(tmp_path):
    run, name = make_run(tmp_path / "run", prompts=2, evaluated="<script>alert(1)"), "<script>alert(1)"
    info = json.loads((run / "run.json").read_text())
    info["settings"]["validation_prompts"] = ["<b>bold</b>"]
    (run / "run.json").write_text(json.dumps(info | {"model": "<u>model</u>"}))
    for table in (run / "evaluations").glob("*.parquet"):
        rows = pyarrow.parquet.read_table(table).to_pylist()
        rows[0]["prompt"] = "a|b <i>x"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    page = write_report(run).read_text()
    assert html.escape(name) in page and "&lt;u&gt;model" in page and "&lt;b&gt;bold" in page
    assert not any(tag in page for tag in ("<script>alert", "<i>x", "<b>bold", "<u>model"))
