"""What the race's rows come to: the best learning rate of each recipe, the tables in Markdown, and the plot."""

import json
import math
import re
import statistics
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from recipe_settings import (
    FRESH_SEEDS,
    LEARNING_RATES,
    LEFT_BEHIND,
    LONG,
    LOWER_RATE,
    RECIPES,
    REPORT_SEEDS,
    TARGET,
    TUNE_SEEDS,
)

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks" / "recipe_rows.jsonl"  # a line per run, and one for what a pass of each recipe costs
PLOT = ROOT / "docs" / "images" / "race.png"
PAGES = tuple(ROOT / "docs" / page for page in ("recipes.md", "algorithms/index.md", "algorithms/fast.md"))
FRESH = "the fresh seeds"  # in place of names in such a mark
TABLE = re.compile(r"(<!-- rows of (.*?) -->\n).*?(<!-- end of these rows -->)", re.DOTALL)


def read_lines(path: Path) -> list[Row]:
    """Return all lines of a file of rows, none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def read_rows(path: Path) -> list[Row]:
    """Return the runs in a file, in the order of the recipes, learning rates and seeds."""
    order = {name: place for place, name in enumerate(RECIPES)}
    rows = [row for row in read_lines(path) if "curves" in row]
    return sorted(rows, key=lambda row: (order[row["recipe"]], row["learning_rate"], row["seed"]))


def read_costs(path: Path) -> dict[str, float]:
    """Return the CPU minutes of a pass of each recipe whose cost was measured."""
    return {row["recipe"]: row["cpu_seconds_per_pass"] / 60 for row in read_lines(path) if "curves" not in row}


def append_row(path: Path, row: Row) -> None:
    """Add a line to a file of rows; several processes may do so at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def scored_curve(row: Row) -> list[float]:
    """Return the held-out rewards of a run, with the recipe's guidance where it trains with guidance."""
    return row["curves"].get("guided", row["curves"]["reward"])


def score(row: Row) -> float:
    """Return the mean held-out reward over the passes of the budget: it counts how soon and how far a run gets.

    What is left of the budget after the last update counts at the last evaluation's reward.
    """
    passes, rewards = row["curves"]["passes"], scored_curve(row)
    end = max(row["max_passes"], passes[-1])
    return float(np.trapezoid([*rewards, rewards[-1]], [*passes, end])) / end


def find_crossing(row: Row) -> float | None:
    """Return the passes at which the held-out reward first reaches `TARGET`, interpolated; None if it never does."""
    points = list(zip(row["curves"]["passes"], row["curves"]["reward"]))
    if points[0][1] >= TARGET:
        return points[0][0]
    for (before, low), (after, high) in zip(points, points[1:]):
        if high >= TARGET:
            return before + (after - before) * (TARGET - low) / (high - low)
    return None


def tune_rows(rows: list[Row], recipe: str) -> dict[float, dict[int, Row]]:
    """Return the rows of a recipe's tuning by learning rate and seed; those of another if it is tuned as that one."""
    by_rate = {rate: {} for rate in (LOWER_RATE, *LEARNING_RATES)}
    recipe = RECIPES[recipe].tuned_as or recipe
    for row in rows:
        if row["recipe"] == recipe and row["seed"] in TUNE_SEEDS and row["learning_rate"] in by_rate:
            by_rate[row["learning_rate"]][row["seed"]] = row
    return by_rate


def first_scores(rows: list[Row], recipe: str) -> dict[float, float]:
    """Return the scores on the first tuning seed of the learning rates that have run on it."""
    first = TUNE_SEEDS[0]
    return {rate: score(seeds[first]) for rate, seeds in tune_rows(rows, recipe).items() if first in seeds}


def choose_grid(rows: list[Row], recipe: str) -> tuple[float, ...]:
    """Return the learning rates to try on the first tuning seed, whether they have run or not."""
    scores = first_scores(rows, recipe)
    if not scores.keys() >= set(LEARNING_RATES) or max(LEARNING_RATES, key=scores.get) > min(LEARNING_RATES):
        return LEARNING_RATES
    return (LOWER_RATE, *LEARNING_RATES)


def find_contenders(rows: list[Row], recipe: str) -> list[float]:
    """Return the learning rates of a recipe that are still in the race.

    A rate is dropped if its score is `LEFT_BEHIND` or more below the best on the first tuning seed, or later on
    average over the first two. A rate that has run on all tuning seeds stays. The list is empty until each of
    `LEARNING_RATES` has run on the first seed.
    """
    if not first_scores(rows, recipe).keys() >= set(LEARNING_RATES):
        return []
    by_rate = tune_rows(rows, recipe)
    left = [rate for rate in choose_grid(rows, recipe) if TUNE_SEEDS[0] in by_rate[rate]]
    for number, bound in enumerate(LEFT_BEHIND, start=1):
        if not all(by_rate[rate].keys() >= set(TUNE_SEEDS[:number]) for rate in left):
            break
        scores = {rate: statistics.mean(score(by_rate[rate][seed]) for seed in TUNE_SEEDS[:number]) for rate in left}
        left = [
            rate
            for rate in left
            if scores[rate] > max(scores.values()) - bound or by_rate[rate].keys() >= set(TUNE_SEEDS)
        ]
    return left


def shared_tune_seeds(rows: list[Row], recipe: str) -> list[int]:
    """Return the tuning seeds on which all contenders of a recipe have run."""
    by_rate, contenders = tune_rows(rows, recipe), find_contenders(rows, recipe)
    return [seed for seed in TUNE_SEEDS if contenders and all(seed in by_rate[rate] for rate in contenders)]


def is_tuned(rows: list[Row], recipe: str) -> bool:
    """Tell whether all contenders of a recipe have run on all tuning seeds, or only one is left."""
    if not first_scores(rows, recipe).keys() >= set(choose_grid(rows, recipe)):
        return False
    return len(find_contenders(rows, recipe)) == 1 or len(shared_tune_seeds(rows, recipe)) == len(TUNE_SEEDS)


def choose_learning_rate(rows: list[Row], recipe: str) -> float | None:
    """Return the contender with the best mean score over the seeds that all contenders have; None without any."""
    by_rate, seeds = tune_rows(rows, recipe), shared_tune_seeds(rows, recipe)
    return max(
        find_contenders(rows, recipe),
        key=lambda rate: statistics.mean(score(by_rate[rate][seed]) for seed in seeds),
        default=None,
    )


def choose_shown(rows: list[Row], recipe: str) -> list[Row]:
    """Return the rows of a recipe that tables and plot show: the reported seeds at one learning rate.

    This is the rate that tuning chose. A recipe that is tuned as another one, with a smaller budget, is shown at the
    best of its own. The list is empty until a seed is reported.
    """
    reported = [row for row in rows if row["recipe"] == recipe and row["seed"] in REPORT_SEEDS]
    rates = dict.fromkeys(row["learning_rate"] for row in reported)
    by_rate = {rate: [row for row in reported if row["learning_rate"] == rate] for rate in rates}
    tuned = None if RECIPES[recipe].tuned_as else choose_learning_rate(rows, recipe)
    return by_rate.get(tuned) or max(by_rate.values(), key=lambda same: statistics.mean(map(score, same)), default=[])


def mean_end(rows: list[Row]) -> float:
    """Return the mean held-out reward at the end of runs, sampled without guidance."""
    return statistics.mean(row["curves"]["reward"][-1] for row in rows)


def bound_chance(rows: list[Row], max_passes: float) -> float:
    """Return how far apart the means of two equal recipes with this budget end by chance, in 95 of 100 cases.

    From the variance between the reported seeds of a recipe, pooled over all recipes.
    """
    shown = [choose_shown(rows, name) for name in RECIPES]
    ends = [[scored_curve(row)[-1] for row in own] for own in shown if own and own[0]["max_passes"] == max_passes]
    variance = statistics.mean(statistics.variance(own) for own in ends if len(own) > 1)
    return 1.96 * math.sqrt(variance * 2 / len(REPORT_SEEDS))


def format_table(rows: list[Row], costs: dict[str, float], names: list[str]) -> str:
    """Return a table of recipes in Markdown: the longer budgets first, then those that end highest."""
    head = ["recipe", "what it does", "learning rate", "passes per sample", "all passes", "held-out reward at the end"]
    head += ["Tesseract", f"passes to {TARGET:g}", "CPU minutes"]
    lines = [head, ["---"] * len(head)]
    shown = {name: own for name in names if (own := choose_shown(rows, name))}
    for name in sorted(shown, key=lambda name: (shown[name][0]["max_passes"] < LONG, -mean_end(shown[name]))):
        own = shown[name]
        passes = [row["curves"]["passes"][-1] for row in own]
        lines.append(
            [
                f"`{name}`",
                RECIPES[name].summary,
                f"{own[0]['learning_rate']:g}",
                f"{statistics.mean(count / row['updates'] for count, row in zip(passes, own)):.3g}",
                f"{statistics.mean(passes):.0f}",
                _list_ends(own, "reward", "guided"),
                _list_ends(own, "tesseract", "guided_tesseract"),
                _list_crossings(own),
                f"{statistics.mean(passes) * costs[name]:.1f}" if name in costs else "–",
            ]
        )
    return _join_lines(lines)


def format_fresh_table(rows: list[Row]) -> str:
    """Return a table in Markdown of all that ran on each of `FRESH_SEEDS`: long runs first, then what ends highest."""
    runs: dict[tuple[str, float, float], list[Row]] = {}
    for row in rows:
        if row["seed"] in FRESH_SEEDS:
            runs.setdefault((row["recipe"], row["learning_rate"], row["max_passes"]), []).append(row)
    head = ["recipe", "learning rate", "budget", "updates", "held-out reward at the end", "Tesseract"]
    head += [f"passes to {TARGET:g}"]
    lines = [head, ["---"] * len(head)]
    full = {run: own for run, own in runs.items() if len(own) == len(FRESH_SEEDS)}
    for name, rate, budget in sorted(full, key=lambda run: (-run[2], -mean_end(full[run]))):
        own = full[name, rate, budget]
        rate = "regulated" if RECIPES[name].passes_per_update else f"{rate:g}"
        ends = [_list_ends(own, "reward", "guided"), _list_ends(own, "tesseract", "guided_tesseract")]
        lines.append([f"`{name}`", rate, f"{budget:g}", f"{own[0]['updates']}", *ends, _list_crossings(own)])
    return _join_lines(lines)


def _join_lines(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _list_crossings(rows: list[Row]) -> str:
    """List the passes to the target of each seed."""
    crossings = ["–" if at is None else f"{at:.0f}" for at in map(find_crossing, rows)]
    return ", ".join(crossings) if set(crossings) != {"–"} else "–"


def _list_ends(rows: list[Row], *curves: str) -> str:
    """List a reward at the end of each seed, and also with the recipe's guidance where it has some."""
    plain, guided = (
        ", ".join(f"{row['curves'][name][-1]:.3f}" for row in rows if name in row["curves"]) for name in curves
    )
    return f"{plain or '–'} (guided {guided})" if guided else plain or "–"


def write_tables(text: str, rows: list[Row], costs: dict[str, float]) -> str:
    """Return the text of a page with a new table after each mark: of the recipes it names, or of fresh seeds."""

    def fill(match: re.Match[str]) -> str:
        is_fresh = match[2] == FRESH
        table = format_fresh_table(rows) if is_fresh else format_table(rows, costs, match[2].split(", "))
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return TABLE.sub(fill, text)


def save_plot(path: Path, rows: list[Row], costs: dict[str, float]) -> None:
    """Draw held-out reward against passes and against CPU minutes, a line per recipe: the mean over its seeds.

    A band goes from the lowest to the highest seed. Recipes of each budget have two pictures beside each other, and a
    legend in the order of their ends; one that is tuned as another is left out. Recipes without a cost are drawn
    against passes only.
    """
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    from diffusion_grpo.report.plots import STYLE

    shown = {name: own for name in RECIPES if not RECIPES[name].tuned_as and (own := choose_shown(rows, name))}
    budgets = sorted({own[0]["max_passes"] for own in shown.values()}, reverse=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 4.6 * len(budgets)), layout="constrained")
        pictures = figure.subplots(len(budgets), 2, sharey="row", squeeze=False)
        for (left, right), budget in zip(pictures, budgets):
            names = [name for name, own in shown.items() if own[0]["max_passes"] == budget]
            for place, name in enumerate(sorted(names, key=lambda name: -mean_end(shown[name]))):
                passes, values = read_curves(shown[name])
                color = colormaps["tab10"](place % 10)
                style = {"color": color, "linestyle": ("-", "--", ":")[place // 10 % 3], "linewidth": 1.4}
                for axes, scale in ((left, 1.0), (right, costs.get(name))):
                    if scale:
                        axes.plot(scale * passes, values.mean(0), label=name, **style)
                        band = {"color": color, "alpha": 0.1, "linewidth": 0}
                        axes.fill_between(scale * passes, values.min(0), values.max(0), **band)
            left.set_xlabel("network passes per sample, summed over updates")
            left.set_ylabel("held-out reward")
            right.set_xlabel("CPU minutes of training")
            legend = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "fontsize": 8}
            right.legend(*left.get_legend_handles_labels(), **legend, title=f"budget of {budget:g} passes")
            for axes in (left, right):
                axes.axhline(TARGET, color="#8a8f98", linewidth=0.8, linestyle=":")
                axes.set_xlim(left=0)
        image = BytesIO()
        figure.savefig(image, dpi=100)
    Image.open(image).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the size


def read_curves(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return passes (evaluations,) and held-out rewards (rows, evaluations), at the passes of the first row."""
    passes = np.array(rows[0]["curves"]["passes"])
    return passes, np.stack([np.interp(passes, row["curves"]["passes"], row["curves"]["reward"]) for row in rows])
