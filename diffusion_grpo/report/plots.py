"""Draw curves of a run: SVG data URIs for the report, a PNG for the card. Only this module imports matplotlib."""

import base64
import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..data.held_out import name_prompts
from .run_folder import Run, name_metrics

TRAIN, HELD_OUT, EVALUATION_ONLY, BASELINE = "#9db8d9", "#1f5fa8", "#a3479a", "#8a8f98"
STAGES = {"rollout": "#1f5fa8", "reward": "#e0a03c", "update": "#4f9d69"}
STYLE = {
    "font.size": 9.5,
    "axes.edgecolor": "#b8bdc6",
    "axes.labelcolor": "#4a4f58",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "xtick.color": "#6a6f78",
    "ytick.color": "#6a6f78",
    "legend.frameon": False,
    "svg.hashsalt": "diffusion-grpo",  # the same run gives the same bytes
}


def _embedded(draw: Callable[..., Figure]) -> Callable[..., str]:
    """Let a function that draws a figure return it as a data URI."""

    @wraps(draw)
    def call(*args, **kwargs) -> str:
        buffer = io.BytesIO()
        with rc_context(STYLE):
            # not `figure.savefig`, which draws everything twice
            FigureCanvasSVG(draw(*args, **kwargs)).print_svg(buffer, metadata={"Date": None, "Creator": None})
        return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

    return call


def save_curve(run: Run, path: Path) -> None:
    """Save the plot of the combined reward as a PNG, for the model card."""
    with rc_context(STYLE):
        _draw_curve(run, "reward", width=8.0, height=3.4).savefig(path, dpi=120, metadata={"Software": None})


def _draw_curve(run: Run, name: str, width: float, height: float, legend: bool = True) -> Figure:
    """Draw a reward over the run with evaluations, their standard errors and the baselines."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    key = "reward" if name == "reward" else f"rewards/{name}/mean"
    trained = [(entry["step"], entry[key]) for entry in run.train if entry.get(key) is not None]
    mean, error = name_metrics(name)
    evaluated = [entry for entry in run.evaluations if entry.get(mean) is not None]
    if trained:
        axes.plot(*zip(*trained, strict=True), color=TRAIN, linewidth=1.4, label="rollouts in training")
    if evaluated:
        axes.errorbar(
            [entry["step"] for entry in evaluated],
            [entry[mean] for entry in evaluated],
            yerr=[entry.get(error) or 0.0 for entry in evaluated],
            label=f"{name_prompts(run.prompts)} prompts ± standard error",
            color=EVALUATION_ONLY if name in run.evaluation_only else HELD_OUT,
            marker="o",
            markersize=4.5,
            linewidth=1.8,
            capsize=3,
        )
    if legend and (trained or evaluated):  # baselines come later and are named at the right edge
        figure.legend(loc="outside upper left", ncols=2 if width > 5 else 1)
    _draw_baselines(axes, {line: mean for line, (mean, _) in run.baseline_cells(name).items() if mean is not None})
    axes.set_xlabel("update")
    _count_updates(axes, 9)
    return figure


draw_curve = _embedded(_draw_curve)


def _draw_baselines(axes: Axes, baselines: dict[str, float]) -> None:
    """Draw dashed lines with names in the right margin, moved apart if the lines are close together."""
    low, high = axes.get_ylim()
    low, high = min([low, *baselines.values()]), max([high, *baselines.values()])
    axes.set_ylim(low, high + 0.02 * (high - low))
    gap = (high - low) * 0.16 / axes.get_figure().get_size_inches()[1]  # a line of text is about 0.16 inch
    previous = float("-inf")
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axes.axhline(value, color=BASELINE, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
        previous = max(value, previous + gap)
        position = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(name, (1.0, previous), color=BASELINE, fontsize=8.5, va="center", **position)


@_embedded
def draw_series(steps: list[int], values: list[float]) -> Figure:
    """Draw one diagnostic in a small plot."""
    figure = Figure(figsize=(3.3, 1.7), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, values, color=HELD_OUT, linewidth=1.3, marker="o" if len(steps) < 3 else None, markersize=3)
    _count_updates(axes, 5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    if min(values) == max(values):  # start a constant's axis at 0, instead of showing tiny fractions around it
        axes.set_ylim(sorted((-0.05 * (values[0] or 1), 2 * values[0] or 1)))
    return figure


@_embedded
def draw_times(steps: list[int], times: dict[str, list[float]]) -> Figure:
    """Draw the seconds of every update, stacked by stage."""
    figure = Figure(figsize=(10, 2.3), layout="constrained")
    axes = figure.add_subplot()
    colors = [STAGES[name] for name in times]
    axes.stackplot(steps, *times.values(), labels=list(times), colors=colors, alpha=0.85, linewidth=0)
    axes.set_xlabel("update")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _count_updates(axes, 9)
    return figure


def _count_updates(axes: Axes, most: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))
