"""Write a run's `report.html`, `summary.json` and `curve.png`; all of them can be written again at any time."""

import base64
import hashlib
import importlib.util
import json
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..config.arguments import read_experiment
from ..data.held_out import describe_prompts, name_prompts
from .gallery import list_rollout_samples, make_gallery
from .run_folder import LOOK, Run, count_updates, find_passed_limit, format_updates, name_method, read_run, summarise

if TYPE_CHECKING:
    from jinja2 import Template

PACKAGES = ("matplotlib",)  # the extra `report`
HERE = Path(__file__).parent

DIAGNOSTICS = {
    "ratio/max_error": "Largest |ratio − 1| of the first update after a rollout. Replay is exact when it is 0.",
    "clip_ratio/region_mean": "Share of samples with a clipped ratio. Always 0 for GRPO with one update per rollout.",
    "frac_reward_zero_std": "Share of groups whose samples all got the same reward: nothing is learned from them.",
    "reward_std": "Spread of the rewards within a group, from which GRPO learns. Falls when little is left to gain.",
    "diversity": "Mean distance between thumbnails of two samples of a prompt: 0 if all images are the same.",
    "frac_advantage_clipped": "Share of advantages at advantage_clip.",
    "kl": "Distance to the reference model.",
    "loss": "The policy's loss, and beta times the KL. Its value says little; look for sudden jumps.",
    "grad_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate.",
}

# how several rewards are combined; everything else is a weighted sum
AGGREGATIONS = {"min_then_normalize": "Smallest", "product_then_normalize": "Product"}


def write_summary(run_dir: str | Path) -> dict[str, Any]:
    """Write `summary.json` of a run and return its contents."""
    run = read_run(run_dir)
    summary = summarise(run)
    (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def write_report(run_dir: str | Path, experiment: str | Path | None = None) -> Path:
    """Write `report.html` of a run, with every plot, image, video and sound inside it."""
    if missing_packages():
        raise ImportError(
            f"The report needs {' and '.join(missing_packages())}: pip install 'diffusion-grpo[report]'."
        )
    import markupsafe

    run = read_run(run_dir)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    page = _load_template().render(
        run=run,
        zip=zip,
        summary=summarise(run),
        results=make_results_table(run),
        findings=list_findings(run),
        watched=make_watched_table(run),
        **draw_curves(run),
        gallery=make_gallery(run),
        rollouts=list_rollout_samples(run),
        method=name_method(run.info)[0],
        prompts=describe_prompts(run.prompts),
        prompts_name=name_prompts(run.prompts),
        aggregation=AGGREGATIONS.get(run.info["settings"].get("multi_objective_aggregation"), "Weighted sum"),
        times=summarise_times(run),
        diagnostics=draw_diagnostics(run),
        settings=yaml.safe_dump(run.info["settings"], sort_keys=True, default_flow_style=None),
        script=markupsafe.Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        experiment=read_experiment(experiment) if experiment else None,
    )
    path = run.path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@cache
def _load_template() -> "Template":
    """Return the page's template; a process with several runs compiles it only once."""
    import jinja2

    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = format_number
    return environment.get_template("page.html.jinja")


def missing_packages() -> list[str]:
    """List missing packages that the report needs, so that a run does not end in an error because of them."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def write_curve(run_dir: str | Path) -> None:
    """Write `curve.png`, the reward over the run, if there is one and the report's packages are installed."""
    run = read_run(run_dir)
    if not missing_packages() and has_curve(run, "reward"):
        from .plots import save_curve

        save_curve(run, run.path / "curve.png")


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number for display, with few digits; `–` if there is none."""
    if value is None or value != value:
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.1e}"


def make_results_table(run: Run) -> list[dict[str, Any]]:
    """Return the rows of the results table, with cells (mean, standard error), for all datasets and for each."""
    names = ["reward", *run.reward_names]
    if not run.evaluations:
        return []
    rows = [{"name": run.times[0], "cells": [run.held_out(name, 0) for name in names]}]
    for line in run.baseline_cells("reward"):  # measured on all datasets
        cells = [run.baseline_cells(name)[line] for name in names]
        rows.append({"name": f"before training, {line}", "cells": cells})
    steps, best = [entry["step"] for entry in run.evaluations], run.published_after
    is_last = best not in steps[1:-1]
    if not is_last:
        cells = [run.held_out(name, steps.index(best)) for name in names]
        rows.append({"name": f"{format_updates(best)}, the weights that were kept", "cells": cells, "trained": True})
    if len(steps) > 1:
        rows.append({"name": run.times[-1], "cells": [run.held_out(name, -1) for name in names], "trained": is_last})
    for dataset in run.datasets:
        for at, when in zip((0, -1)[-len(run.times) :], run.times, strict=True):
            cells = [run.held_out(name, at, dataset) for name in names]
            rows.append({"name": f"{dataset}, {when}", "cells": cells, "trained": at == -1 and len(run.times) > 1})
    return rows


def make_watched_table(run: Run) -> list[tuple[str, float, float | None, float, float | None]]:
    """Return name, and mean and standard error before and after, of each reward that was only watched."""
    if len(run.evaluations) < 2:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]
    rows = []
    for key in (key for key in first if key in last):
        if match := re.fullmatch("eval_watch/(.+)/mean", key):
            error = f"eval_watch/{match[1]}/std_error"
            rows.append((match[1], first[key], first.get(error), last[key], last.get(error)))
    return rows


def list_findings(run: Run) -> list[str]:
    """List what a careful reader would notice: replay errors, groups without signal, a reward that fell."""
    findings = []
    errors = [entry["ratio/max_error"] for entry in run.train if "ratio/max_error" in entry]
    if errors and max(errors) > 1e-5:
        findings.append(
            f"The first ratio after a rollout is off by up to {format_number(max(errors))}: rollout and replay differ "
            "(see the troubleshooting page)."
        )
    silent = [entry["frac_reward_zero_std"] for entry in run.train if "frac_reward_zero_std" in entry][-5:]
    if silent and sum(silent) / len(silent) > 0.5:
        findings.append(
            "In the last rollouts more than half of the groups had equal rewards and taught nothing. If the samples "
            "look alike, raise noise_level or num_trained_steps."
        )
    passed = run.info.get("stopped") or find_passed_limit(run.train)
    findings += [f"{passed} {LOOK}"] if passed else []
    if run.prompts["eval_in_train"]:
        findings.append(
            f"The evaluations are on {describe_prompts(run.prompts)}: they do not say how well the model does on new "
            "prompts."
        )
    if run.published_after not in (None, run.updates):
        findings.append(f"The weights are those of the best evaluation, {format_updates(run.published_after)}.")
    if len(run.evaluations) < 2:
        findings.append(
            "There are fewer than two evaluations, so nothing can be said about what was learned; set eval_dataset "
            "and eval_strategy: steps."
        )
        return findings
    changes = [describe_finding(run, name) for name in ["reward", *run.reward_names]]
    return findings + [sentence for sentence in changes if sentence is not None]


def describe_finding(run: Run, name: str) -> str | None:
    """Describe a reward that fell in evaluations or did not change beyond its noise; None if it rose."""
    (before, error_before), (after, error_after) = run.held_out(name, 0), run.held_out(name, -1)
    if None in (before, after):
        return None
    label = "The combined reward" if name == "reward" else name
    label += " (evaluation only, never trained on)" if name in run.evaluation_only else ""
    if None in (error_before, error_after):
        return f"{label} was measured on a single prompt, so its noise is unknown: {before:.3f}, then {after:.3f}."
    is_visible = f"{before:.3f}" != f"{after:.3f}"
    if not is_visible or abs(after - before) <= 2 * math.hypot(error_before, error_after):
        return f"{label} did not change beyond its noise: {before:.3f}, then {after:.3f}."
    if after > before:
        return None
    return f"{label} fell on {name_prompts(run.prompts)} prompts, from {before:.3f} to {after:.3f}."


def has_curve(run: Run, name: str) -> bool:
    key = "reward" if name == "reward" else f"rewards/{name}/mean"
    return any(
        entry.get(metric) is not None for entry in run.train + run.evaluations for metric in (key, f"eval_{key}")
    )


def draw_curves(run: Run) -> dict[str, Any]:
    """Draw the combined reward, also for a phone, whose screen would shrink the letters, and each reward function."""
    from .plots import draw_curve

    wide, narrow = (10.0, 3.7), (3.6, 3.0)
    main = [draw_curve(run, "reward", *size) for size in (wide, narrow) if has_curve(run, "reward")]
    small = {name: draw_curve(run, name, 4.4, 2.6, False) for name in run.reward_names if has_curve(run, name)}
    return {"curve": main, "small_curves": small}


def summarise_times(run: Run) -> dict[str, Any] | None:
    """Return the mean seconds of each stage of an update, their shares, and a plot over the run."""
    from .plots import STAGES, draw_times

    entries = [entry for entry in run.train if all(f"time/{stage}" in entry for stage in STAGES)]
    if not entries:
        return None
    series = {stage: [entry[f"time/{stage}"] for entry in entries] for stage in STAGES}
    means = {stage: statistics.fmean(values, count_updates(entries)) for stage, values in series.items()}
    total = sum(means.values()) or 1.0
    stages = [
        {"name": stage, "seconds": mean, "share": mean / total, "color": STAGES[stage]}
        for stage, mean in means.items()
    ]
    plot = draw_times([entry["step"] for entry in entries], series) if len(entries) > 1 else None
    return {"stages": stages, "total": total, "plot": plot}


def draw_diagnostics(run: Run) -> list[dict[str, str]]:
    """Return a small plot and a sentence for each diagnostic that was logged."""
    from .plots import draw_series

    plots = []
    for key, text in DIAGNOSTICS.items():
        entries = [entry for entry in run.train if entry.get(key) is not None]
        if entries:
            steps, values = [entry["step"] for entry in entries], [entry[key] for entry in entries]
            plot = draw_series(steps, values)
            plots.append({"name": key, "text": text, "plot": plot, "last": values[-1], "most": max(values, key=abs)})
    return plots
