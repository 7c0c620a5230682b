"""Draw curves of a run: SVG data URIs for the report, a PNG for the card. Only this module imports matplotlib."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TRAIN, HELD_OUT, EVALUATION_ONLY, BASELINE = "#9db8d9", "#1f5fa8", "#a3479a", "#8a8f98"
STAGES = {"rollout": "#1f5fa8", "reward": "#e0a03c", "update": "#4f9d69"}

TICKS = {"integer": True, "steps": [1, 2, 5, 10]}

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


@dataclass
class Curve:
    """One reward over the run; every list may be empty."""

    name: str
    train_steps: list[int]
    train: list[float]
    eval_steps: list[int]
    eval: list[float]
    eval_errors: list[float]
    baselines: dict[str, float]
    is_evaluation_only: bool = False
    prompts: str = "held-out"


def draw_curve(curve: Curve, width: float = 10.0, height: float = 3.7, legend: bool = True) -> str:
    """Draw a reward over the run with held-out points, their standard errors and the baselines, as a data URI."""
    with rc_context(STYLE):
        return _data_uri(_curve_figure(curve, width, height, legend), f"{curve.name} during the run")


def save_curve(curve: Curve, path: Path) -> None:
    """Save the plot of a reward as a PNG, for the model card."""
    with rc_context(STYLE):
        _curve_figure(curve, width=8.0, height=3.4, legend=True).savefig(path, dpi=120, metadata={"Software": None})


def _curve_figure(curve: Curve, width: float, height: float, legend: bool) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    color = EVALUATION_ONLY if curve.is_evaluation_only else HELD_OUT
    if curve.train:
        axes.plot(curve.train_steps, curve.train, color=TRAIN, linewidth=1.4, label="rollouts in training")
    if curve.eval:
        label = f"{curve.prompts} prompts ± standard error"
        errors = curve.eval_errors or None
        style = {"color": color, "marker": "o", "markersize": 4.5, "linewidth": 1.8, "capsize": 3}
        axes.errorbar(curve.eval_steps, curve.eval, yerr=errors, label=label, **style)
    if legend and (curve.train or curve.eval):  # baselines come later and are named at the right edge
        figure.legend(loc="outside upper left", ncols=2 if width > 5 else 1)
    _draw_baselines(axes, curve.baselines)
    axes.set_xlabel("update")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, **TICKS))
    return figure


def _draw_baselines(axes: Axes, baselines: dict[str, float]) -> None:
    """Draw dashed lines with names in the right margin, moved apart if the lines are close together."""
    low, high = axes.get_ylim()
    low, high = min([low, *baselines.values()]), max([high, *baselines.values()])
    axes.set_ylim(low, high + 0.02 * (high - low))
    height = axes.get_figure().get_size_inches()[1]
    gap = (high - low) * 0.16 / height  # a line of text is about 0.16 inch
    previous = float("-inf")
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axes.axhline(value, color=BASELINE, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
        previous = max(value, previous + gap)
        position = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(name, (1.0, previous), color=BASELINE, fontsize=8.5, va="center", **position)


def draw_series(name: str, steps: list[int], values: list[float]) -> str:
    """Draw one diagnostic in a small plot, as a data URI."""
    with rc_context(STYLE):
        figure = Figure(figsize=(3.3, 1.7), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(steps, values, color=HELD_OUT, linewidth=1.3, marker="o" if len(steps) < 3 else None, markersize=3)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, **TICKS))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        if min(values) == max(values):  # start a constant's axis at 0, instead of showing tiny fractions around it
            axes.set_ylim(sorted((-0.05 * (values[0] or 1), 2 * values[0] or 1)))
        return _data_uri(figure, name)


def draw_times(steps: list[int], times: dict[str, list[float]]) -> str:
    """Draw the seconds of every update, stacked by stage, as a data URI."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 2.3), layout="constrained")
        axes = figure.add_subplot()
        colors = [STAGES[name] for name in times]
        axes.stackplot(steps, *times.values(), labels=list(times), colors=colors, alpha=0.85, linewidth=0)
        axes.set_xlabel("update")
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, **TICKS))
        return _data_uri(figure, "seconds of every update")


def _data_uri(figure: Figure, title: str) -> str:
    buffer = io.BytesIO()
    # not `figure.savefig`, which draws everything twice
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Title": title})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
