"""Read and sum up what a run left in its folder as one `Run`, for report, summary and card; put results into words.

Evaluations of a running job use its means, and `stop_when` its comparison of metrics with their limits.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from ..data.prompts import UNNAMED

# Name and paper of each `loss_type` that is not GRPO's own.
METHODS = {
    "grpo_guard": ("GRPO-Guard", "2510.22319"),
    "dppo": ("Flow-DPPO", "2606.11025"),
    "fdfo": ("finite-difference flow optimisation", "2603.12893"),
    "nft": ("DiffusionNFT", "2509.16117"),
    "awm": ("AWM", "2509.25050"),
    "dgpo": ("DGPO", "2510.08425"),
    "dpo": ("online Diffusion-DPO", "2311.12908"),
    "draft": ("DRaFT", "2309.17400"),
}
# metrics of rollouts and updates that each evaluation repeats, as it has no groups and no updates itself
ROLLOUTS = ("diversity", "frac_reward_zero_std", "clip_ratio/region_mean", "frac_advantage_clipped")
LOG_OF_EVALUATIONS = "evaluations/trainer_state.json"  # the log of a run that is active
WINDOW = 5  # number of updates at the start and at the end that are compared to find reward hacking
# by metric, what every run warns of, whatever its own limits (`stop_when`). Runs of `make demo` left 0.51 to 0.61 of
# the diversity: samples that are all right are more alike than samples that are wrong in different ways
LIMITS = {"diversity": 0.4}
LOOK = 'Look at the samples, and see "Reward hacking" in docs/rewards/hacking.md.'


@dataclass
class Run:
    """A run, as read from its folder."""

    path: Path
    info: dict[str, Any]
    train: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    baselines: list[dict[str, Any]]
    samples: dict[int, list[dict[str, Any]]]
    rollouts: dict[int, list[dict[str, Any]]]
    seconds: float
    updates: int

    @property
    def reward_names(self) -> list[str]:
        """Trained rewards, then evaluation-only ones."""
        return [*self.info["reward_funcs"], *self.evaluation_only]

    @property
    def evaluation_only(self) -> list[str]:
        """Evaluation-only rewards: measured, never trained on."""
        return self.info["eval_reward_funcs"]

    @property
    def prompts(self) -> dict[str, int | None]:
        """Numbers of prompts; see `held_out.count_prompts`."""
        return self.info["prompts"]

    @property
    def datasets(self) -> list[str]:
        """Names of the evaluation's datasets, if there are several."""
        names = {row.get("dataset"): None for rows in self.samples.values() for row in rows}  # in order
        names = [name for name in names if name not in (None, UNNAMED)]
        return names if len(names) > 1 else []

    @property
    def times(self) -> list[str]:
        """When the first and the last evaluation took place, in words; one entry if they are the same, or none."""
        return list(dict.fromkeys(format_updates(self.evaluations[at]["step"]) for at in (0, -1) if self.evaluations))

    @property
    def published_after(self) -> int | None:
        """Number of updates after which the folder's weights were saved, if these are the best and not the last."""
        return self.info.get("published_after")

    def cut(self, step: int) -> "Run":
        """Return the run with only the held-out evaluations up to update `step`."""
        evaluations = [entry for entry in self.evaluations if entry["step"] <= step]
        samples = {at: rows for at, rows in self.samples.items() if at <= step}
        return dataclasses.replace(self, evaluations=evaluations, samples=samples)

    def held_out(self, name: str, index: int, dataset: str | None = None) -> tuple[float | None, float | None]:
        """Return mean and standard error of `reward` or a reward function in evaluation `index` (0 first, -1 last)."""
        if not self.evaluations:
            return None, None
        mean, error = name_metrics(name, "eval" if dataset is None else f"eval_{dataset}")
        return self.evaluations[index].get(mean), self.evaluations[index].get(error)

    def baseline_cells(self, name: str) -> dict[str, tuple[float | None, float | None]]:
        """Return mean and standard error of `reward` or a reward function in each baseline, by the baseline's name."""
        cells = {}
        for line in self.baselines:
            cell = line["reward"] if name == "reward" else line["rewards"].get(name, {})
            cells[line["name"]] = (cell.get("mean"), cell.get("std_error"))
        return cells

    def find_file(self, name: str | None) -> Path | None:
        """Return the path of a file that a table names, if it is there."""
        return self.path / name if name and (self.path / name).is_file() else None

    def pair_samples(self) -> list[dict[str, Any]]:
        """Pair samples of the first and the last evaluation: same dataset, same prompt, same seed."""
        if len(self.samples) < 2:
            return []
        before = {key_of(row): row for row in self.samples[min(self.samples)]}
        rows = [row for row in self.samples[max(self.samples)] if key_of(row) in before]
        return [{"prompt": row["prompt"], "before": before[key_of(row)], "after": row} for row in rows]


def key_of(row: dict[str, Any]) -> tuple[str | None, str, int]:
    """Return what a sample shares with those of other evaluations."""
    return row.get("dataset"), row["prompt"], row["seed"]


def name_metrics(name: str, prefix: str = "eval") -> tuple[str, str]:
    """Return the log's names for mean and standard error of `reward` or a reward function in evaluations."""
    if name == "reward":
        return f"{prefix}_reward", f"{prefix}_reward_std_error"
    return f"{prefix}_rewards/{name}/mean", f"{prefix}_rewards/{name}/std_error"


def name_error(metric: str) -> str | None:
    """Return the log's name for the standard error of a reward's mean in evaluations; None for other metrics."""
    if metric.endswith("/mean"):
        return metric.removesuffix("mean") + "std_error"
    return f"{metric}_std_error" if metric.endswith("_reward") else None


# Reading


def read_run(run_dir: str | Path) -> Run:
    """Read the folder of a finished, stopped or running run."""
    path = Path(run_dir)
    if not (path / "run.json").is_file():
        raise ValueError(f"{path} contains no run.json, so it is not the output folder of a run.")
    info = json.loads((path / "run.json").read_text(encoding="utf-8"))
    history = read_log_history(path)
    # an update on a rollout that an earlier update has used has no reward
    train = [entry for entry in history if entry.keys() & {"reward", "time/update"} and "eval_reward" not in entry]
    evaluations = list({entry["step"]: entry for entry in history if "eval_reward" in entry}.values())
    baselines = path / "baselines.json"
    return Run(
        path=path,
        info=info,
        train=sorted({entry["step"]: entry for entry in train}.values(), key=lambda entry: entry["step"]),
        evaluations=sorted(evaluations, key=lambda entry: entry["step"]),
        baselines=json.loads(baselines.read_text(encoding="utf-8")) if baselines.is_file() else [],
        samples=read_samples(path),
        rollouts=read_rollouts(path),
        seconds=measure_seconds(history),
        updates=max((entry["step"] for entry in history), default=0),
    )


def read_log_history(path: Path) -> list[dict[str, float]]:
    """Return the longest log: that of the finished run, of its newest checkpoint, or of its last evaluation."""
    states = [path / "trainer_state.json", *path.glob("checkpoint-*/trainer_state.json"), path / LOG_OF_EVALUATIONS]
    histories = [json.loads(state.read_text(encoding="utf-8"))["log_history"] for state in states if state.is_file()]
    return max(histories, key=lambda history: max((entry["step"] for entry in history), default=-1), default=[])


def read_samples(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Read samples of every evaluation that left a table, by step, in the order of the evaluation's prompts."""
    tables = _read_tables(path.glob("evaluations/step-*.parquet"))
    # several processes take turns at the prompts of an evaluation and write a table each
    turns = {step: itertools.chain.from_iterable(itertools.zip_longest(*parts)) for step, parts in tables.items()}
    return {step: [row for row in turns[step] if row is not None] for step in sorted(turns)}


def read_rollouts(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Read samples of training that were kept as files, by step, in the order of their positions in the rollout."""
    names = [folder.name for folder in path.glob("samples/step-*/")]
    tables = _read_tables(file for name in names for file in path.glob(f"samples/{name}*.parquet"))
    rows = {step: [row for part in tables[step] for row in part if row.get("image")] for step in sorted(tables)}
    return {step: sorted(kept, key=lambda row: row["image"]) for step, kept in rows.items() if kept}


def _read_tables(files: Iterable[Path]) -> dict[int, list[list[dict[str, Any]]]]:
    """Read tables by step; each process has written one."""
    tables: dict[int, list[list[dict[str, Any]]]] = defaultdict(list)
    for file in sorted(files, key=lambda file: (len(file.stem), file.stem)):
        tables[int(file.stem.split("-")[1])].append(pyarrow.parquet.read_table(file).to_pylist())
    return tables


# Numbers


def measure_mean(values: Iterable[float | None], prompts: Iterable[Hashable]) -> tuple[float, float | None] | None:
    """Return the mean of samples and its standard error, which counts the samples of a prompt as one observation."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for value, prompt in zip(values, prompts, strict=True):
        if value is not None and not math.isnan(value):
            groups[prompt].append(value)
    if not groups:
        return None
    mean = statistics.fmean(value for group in groups.values() for value in group)
    if len(groups) == 1:
        return mean, None
    # samples of a prompt share its difficulty, so they are not independent evidence of the mean over other prompts
    return mean, statistics.stdev(map(statistics.fmean, groups.values())) / math.sqrt(len(groups))


def count_updates(entries: list[dict[str, float]]) -> list[int]:
    """Return for each entry of a log, by step, the number of updates since the entry before it."""
    steps = [0, *(entry["step"] for entry in entries)]
    return [max(1, step - last) for last, step in itertools.pairwise(steps)]


def measure_speed(entries: list[dict[str, float]]) -> float | None:
    """Return the samples per second of a run: those of all rollouts, divided by the time of their updates."""
    known = [entry for entry in entries if "samples_per_second" in entry]
    speeds = [entry["samples_per_second"] for entry in known]
    return statistics.harmonic_mean(speeds, weights=count_updates(known)) if speeds else None


def measure_seconds(history: list[dict[str, float]]) -> float:
    """Return the wall time: the trainer's or, as that starts at the last resume, the sum of the logged parts."""
    measured = max((entry["train_runtime"] for entry in history if "train_runtime" in entry), default=0.0)
    timed = [entry for entry in history if "time/rollout" in entry]  # means over the updates since the previous entry
    parts = sum(entry.get("eval_runtime", 0.0) for entry in history)
    for entry, updates in zip(timed, count_updates(timed), strict=True):
        parts += updates * sum(value for key, value in entry.items() if key.startswith("time/"))
    return max(measured, parts)


def summarise(run: Run) -> dict[str, Any]:
    """Return the contents of summary.json, with None where nothing was measured."""
    steps = [entry["step"] for entry in run.evaluations]
    total = compare(run, "reward")
    return {
        "evaluation_prompts": run.prompts["eval"],
        "evaluation_prompts_in_training": run.prompts["eval_in_train"],
        "first_evaluation_after": steps[0] if steps else None,
        "last_evaluation_after": steps[-1] if steps else None,
        **{f"reward_{when}": total[when] for when in ("before", "first", "after")},
        "standard_error": total["standard_error"],
        "rewards": {name: compare(run, name) for name in run.reward_names},
        "datasets": {
            dataset: {name: compare(run, name, dataset) for name in ["reward", *run.reward_names]}
            for dataset in run.datasets
        },
        "seconds": run.seconds,
        "samples_per_second": measure_speed(run.train),
        "updates": run.updates,
        "published_after": run.updates if run.published_after is None else run.published_after,
        "stopped": run.info.get("stopped"),
    }


def compare(run: Run, name: str, dataset: str | None = None) -> dict[str, float | None]:
    """Return the means `before` training, `first` of several and `after` updates, and the last standard error."""
    steps = [entry["step"] for entry in run.evaluations]
    first, (last, error) = run.held_out(name, 0, dataset)[0], run.held_out(name, -1, dataset)
    return {
        "before": first if steps and steps[0] == 0 else None,
        "first": first if len(steps) > 1 else None,
        "after": last if steps and steps[-1] > 0 else None,
        "standard_error": error,
    }


# Signs of reward hacking


def summarise_rollouts(log: list[dict[str, float]]) -> dict[str, float]:
    """Return metrics of the rollouts and updates since the last evaluation that may show reward hacking."""
    last = max((place for place, entry in enumerate(log) if any(key.startswith("eval_") for key in entry)), default=-1)
    logged = {key: [entry[key] for entry in log[last + 1 :] if key in entry] for key in ROLLOUTS}
    return {f"rollouts/{key}": sum(values) / len(values) for key, values in logged.items() if values}


def find_passed_limit(log: list[dict[str, float]], limits: dict[str, float] = LIMITS) -> str | None:
    """Say of the first metric of a log that has passed its limit how it did so; see the setting `stop_when`."""
    for name, limit in limits.items():
        entries = [entry for entry in log if entry.get(name) is not None]
        size = 1 if name.startswith("eval_") else WINDOW  # one rollout says little
        if not entries:
            continue
        start, now = (np.mean([entry[name] for entry in part]) for part in (entries[:size], entries[-size:]))
        best, error = max(entries, key=lambda entry: entry[name]), name_error(name)
        if error is not None:
            is_passed = best[name] - now > limit * math.hypot(best[error], entries[-1][error])
            how = f"fell from {best[name]:.3g} to {now:.3g}, by more than {limit:g} standard errors"
        elif "diversity" in name:
            is_passed, how = now < limit * start, f"fell from {start:.3g} to {now:.3g}, below {limit:g} of its start"
        else:
            is_passed, how = now > limit, f"rose to {now:.3g}, above {limit:g}"
        if is_passed:
            return f"{name} {how}."
    return None


# Words


def name_method(info: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return a run's training method, from its run.json, and the method's papers by name; a user's own has none."""
    loss = info["settings"].get("loss_type", "grpo")
    if loss == "grpo":
        return "GRPO", {"Flow-GRPO": "2505.05470", "DDPO": "2305.13301"}
    return METHODS[loss][0] if loss in METHODS else loss, dict([METHODS[loss]] if loss in METHODS else [])


def format_updates(step: int) -> str:
    """Describe when something was measured: `before training`, `after 1 update`, `after 20 updates`."""
    return "before training" if step == 0 else f"after {step} update{'s' if step > 1 else ''}"


def format_measured(mean: float, error: float | None) -> str:
    """Format a mean with its standard error, if that is known."""
    return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"


def describe_change(run: Run, name: str) -> str | None:
    """Describe evaluation results, such as `0.400 ± 0.020 before training, 0.900 ± 0.020 after 20 updates`.

    The second are those of the weights that the run left, which may not be those of its last evaluation.
    """
    run = run if run.published_after is None else run.cut(run.published_after)
    values = [run.held_out(name, at) for at in (0, -1)[-len(run.times) :]]
    if not run.times or any(mean is None for mean, _ in values):
        return None
    return ", ".join(f"{format_measured(*value)} {when}" for value, when in zip(values, run.times, strict=True))
