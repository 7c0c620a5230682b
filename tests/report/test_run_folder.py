"""What a run left is read the same way for report, summary and card."""

import json
import math
import statistics

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from run_folders import make_run

from diffusion_grpo.algorithms import ALGORITHMS
from diffusion_grpo.report.page import summarise_times, write_report, write_summary
from diffusion_grpo.report.run_folder import (
    measure_mean,
    measure_seconds,
    name_method,
    read_log_history,
    read_run,
    read_samples,
)

pytestmark = pytest.mark.plots


def test_summary_has_the_promised_keys_and_the_first_and_last_evaluation(tmp_path):
    summary = write_summary(make_run(tmp_path / "run"))
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    measured = {"before": pytest.approx(0.4), "first": pytest.approx(0.4), "after": pytest.approx(0.9)}
    measured["standard_error"] = 0.03
    assert summary == {
        "evaluation_prompts": 12,
        "evaluation_prompts_in_training": 0,
        "first_evaluation_after": 0,
        "last_evaluation_after": 20,
        "reward_before": pytest.approx(0.4),
        "reward_first": pytest.approx(0.4),
        "reward_after": pytest.approx(0.9),
        "standard_error": 0.02,
        "rewards": dict.fromkeys(["text", "color", "tesseract"], measured),
        "datasets": {},
        "seconds": 123.0,
        "samples_per_second": pytest.approx(40.0),
        "updates": 20,
        "published_after": 20,
        "stopped": None,
    }


def test_the_speed_of_a_run_is_that_of_all_its_rollouts(tmp_path):
    """Two rollouts of 80 samples, in 8 s and in 2 s; each serves two updates, and the second one logs the speed."""
    run = make_run(tmp_path / "run", updates=0, prompts=1)
    stages = {"time/rollout": 0.0, "time/reward": 0.0, "time/update": 1.0}
    history = [{"step": step, "loss": 0.1, **stages} for step in range(1, 5)]
    for entry, seconds in ((history[0], 6.0), (history[2], 0.0)):
        entry |= {"reward": 0.5, "time/rollout": seconds}
    history[1]["samples_per_second"], history[3]["samples_per_second"] = 80 / 8, 80 / 2
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert write_summary(run)["samples_per_second"] == pytest.approx(160 / 10)
    assert [entry["step"] for entry in read_run(run).train] == [1, 2, 3, 4]
    assert summarise_times(read_run(run))["total"] == pytest.approx(10 / 4)


def test_an_entry_of_more_updates_counts_more(tmp_path):
    """One update of 10 s, as logging_first_step has it logged, then nine of 1 s; each makes 80 samples."""
    run = make_run(tmp_path / "run", updates=0, prompts=1)
    history = []
    for step, seconds in ((1, 10.0), (10, 1.0)):
        stages = {"time/rollout": seconds / 2, "time/reward": 0.0, "time/update": seconds / 2}
        history.append({"step": step, "reward": 0.5, "samples_per_second": 80 / seconds, **stages})
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    summary, times = write_summary(run), summarise_times(read_run(run))
    assert summary["samples_per_second"] == pytest.approx(800 / 19)
    assert summary["seconds"] == pytest.approx(19.0) and times["total"] == pytest.approx(19 / 10)


def test_an_active_run_is_read_from_its_last_evaluation(tmp_path):
    run = make_run(tmp_path / "run", stop=0.8)
    (run / "trainer_state.json").rename(run / "evaluations" / "trainer_state.json")
    assert (write_summary(run)["updates"], write_summary(run)["reward_after"]) == (20, pytest.approx(0.8))


def test_a_run_in_progress_is_read_from_its_newest_checkpoint(tmp_path):
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


def test_evaluations_of_several_processes_are_read_in_the_order_of_their_prompts(tmp_path):
    with pytest.raises(ValueError, match="no run.json"):
        read_run(tmp_path)
    folder = tmp_path / "evaluations"
    folder.mkdir()
    for name, prompts in (("step-000005-rank0", ["a", "c"]), ("step-000005-rank1", ["b"]), ("step-000000", ["x"])):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts}), folder / f"{name}.parquet")
    found = read_samples(tmp_path)
    assert {step: [row["prompt"] for row in rows] for step, rows in found.items()} == {0: ["x"], 5: ["a", "b", "c"]}


def test_the_longest_log_counts_and_the_wall_time_is_that_of_all_parts(tmp_path):
    run = make_run(tmp_path / "run", updates=4, eval_every=4)
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    (run / "checkpoint-2").mkdir()
    (run / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": history[:2]}))
    assert read_log_history(run) == history
    history[-1]["train_runtime"] = 3.0  # counted from the last resume
    assert measure_seconds(history) == pytest.approx(4 * 6.0)
    assert measure_seconds([{"step": 1, "eval_runtime": 2.0}]) == 2.0


def test_every_loss_of_ours_has_a_name_and_a_paper_and_ones_own_is_not_called_grpo(tmp_path):
    for loss in ALGORITHMS:
        name, papers = name_method({"settings": {"loss_type": loss}})
        assert name != loss and papers and (name == "GRPO") == (loss == "grpo")
    assert name_method({"settings": {}})[0] == "GRPO"
    assert name_method({"settings": {"loss_type": "mine.loss"}}) == ("mine.loss", {})
    run = make_run(tmp_path / "run", prompts=1)
    info = json.loads((run / "run.json").read_text())
    info["settings"] |= {"loss_type": "nft", "multi_objective_aggregation": "min_then_normalize"}
    (run / "run.json").write_text(json.dumps(info))
    page = write_report(run).read_text()
    assert "with DiffusionNFT" in page and "with GRPO" not in page and "· DiffusionNFT</title>" in page
    assert "Smallest of the trained rewards" in page and "Weighted sum" not in page


def test_one_sample_per_prompt_is_the_usual_error():
    values = [0.1, 0.4, 0.9, math.nan, None]
    mean, error = measure_mean(values, "abcde")
    assert mean == pytest.approx(statistics.mean(values[:3]))
    assert error == pytest.approx(statistics.stdev(values[:3]) / math.sqrt(3))
    assert measure_mean([math.nan, None], "ab") is None
    assert measure_mean([1.0, 2.0], ["cat", "cat"]) == (1.5, None)


def test_more_samples_per_prompt_do_not_hide_how_prompts_differ():
    """Against the real spread of the mean over many draws of the prompts."""
    draw = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        rewards = draw.normal(0, 0.3, (16, 1)) + draw.normal(0, 0.05, (16, 8))
        mean, error = measure_mean(rewards.flatten().tolist(), np.arange(128) // 8)
        means.append(mean)
        errors.append(error)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(means), rel=0.1)
