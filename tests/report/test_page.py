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
from run_folders import change_log, make_run

from diffusion_grpo.data.held_out import describe_prompts
from diffusion_grpo.report.page import list_findings, make_results_table, write_report, write_summary
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
    run = make_run(tmp_path / "run", start=0.4, stop=0.9)
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
    assert "0.400 → 0.900" in page and "guidance 2" in page  # what was gained
    assert "12 held-out samples 12 got a higher reward than before, 0 the same, 0 a lower one" in page


def findings_of(folder, **run):
    return " ".join(list_findings(read_run(make_run(folder, prompts=1, **run))))


def test_findings(tmp_path):
    assert findings_of(tmp_path / "rose") == ""
    assert "did not change beyond its noise" in findings_of(tmp_path / "flat", start=0.5, stop=0.51)
    assert "fell on held-out prompts" in findings_of(tmp_path / "worse", start=0.6, stop=0.3)
    assert "all of which are trained on" in findings_of(tmp_path / "known", shared=1)
    assert "fewer than two evaluations" in findings_of(tmp_path / "short", updates=5)


@pytest.mark.parametrize(("share", "error", "is_told"), [(1.0, 2e-5, True), (0.5, 1e-5, False)])
def test_signs_of_a_useless_or_wrong_run_stand_out_however_many_updates_a_rollout_serves(
    tmp_path, share, error, is_told
):
    def change(entry):
        if entry["step"] == 10 and "reward" in entry:
            entry |= {"frac_reward_zero_std": share, "ratio/max_error": error}
        elif "reward" in entry:  # an update on a rollout that was made before
            del entry["reward"], entry["frac_reward_zero_std"], entry["ratio/max_error"]

    found = " ".join(list_findings(read_run(change_log(make_run(tmp_path / "run"), change))))
    assert ("more than half of the groups had equal rewards" in found) == is_told
    assert ("rollout and replay differ" in found) == is_told


@pytest.mark.parametrize(
    ("error", "words"), [(0.0, "beyond its noise: 0.951, then 0.951"), (None, "noise is unknown")]
)
def test_no_change_is_claimed_within_the_standard_error(tmp_path, error, words):
    def change(entry):
        entry |= {key: error for key in entry if key.endswith("std_error")}

    run = change_log(make_run(tmp_path / "run", start=0.9512, stop=0.9508), change)  # both print as 0.951
    found = " ".join(list_findings(read_run(run)))
    assert words in found and "fell on" not in found


@pytest.mark.parametrize(
    ("steps", "measured", "first", "change"),
    [
        ([], [None, None, None], None, None),
        ([0], [0.4, None, None], 0, "0.400 ± 0.020 before training"),
        ([20], [None, None, 0.9], 20, "0.900 ± 0.020 after 20 updates"),
        ([10, 20], [None, 0.65, 0.9], 10, "0.650 ± 0.020 after 10 updates, 0.900 ± 0.020 after 20 updates"),
    ],
)
def test_what_was_measured_after_updates_is_not_called_before(tmp_path, steps, measured, first, change):
    """As in a run without `eval_on_start`."""
    run = make_run(tmp_path / "run", baselines=False)
    change_log(run, lambda entry: entry.clear() if "eval_reward" in entry and entry["step"] not in steps else None)
    for table in (run / "evaluations").glob("*.parquet"):
        if int(table.stem.split("-")[1]) not in steps:
            table.unlink()
    summary = write_summary(run)
    assert [summary[f"reward_{when}"] for when in ("before", "first", "after")] == pytest.approx(measured)
    assert [summary["rewards"]["text"][when] for when in ("before", "first", "after")] == pytest.approx(measured)
    assert (summary["first_evaluation_after"], describe_change(read_run(run), "reward")) == (first, change)
    page = write_report(run).read_text()
    assert "Before and after" not in page and ("→" in page) == (len(steps) > 1)
    assert ("got a higher reward than after 10 updates" in page) == (len(steps) > 1)


def test_the_change_that_is_told_is_that_of_the_weights_that_were_kept(tmp_path):
    run = read_run(make_run(tmp_path / "run", baselines=False))
    for best in (10, 20):
        run.info["published_after"] = best
        assert describe_change(run, "reward").endswith(f" after {best} updates")
        rows = make_results_table(run)
        assert [row["cells"][0][0] for row in rows] == pytest.approx([0.4, 0.65, 0.9] if best == 10 else [0.4, 0.9])
        [kept] = [row for row in rows if row.get("trained")]
        assert kept["name"].startswith(f"after {best} updates")


def test_the_report_claims_no_more_than_was_compared(tmp_path):
    page = write_report(make_run(tmp_path / "run", shared=12)).read_text()
    assert describe_prompts({"eval": 12, "eval_in_train": 12}) in page and "held-out" not in page


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
