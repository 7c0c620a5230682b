"""What the race's rows come to: the best learning rate of each recipe, the tables in Markdown, and the plot."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from recipe_settings import LEARNING_RATES, LEFT_BEHIND, LOWER_RATE, RECIPES, REPORT_SEEDS, TUNE_SEEDS, find_phase

Row = dict[str, Any]
COSTS = "costs.json"  # in the rows' folder: the CPU time of a pass of each recipe, all from one machine
ENOUGH_RECIPES = 10  # to tell how far apart the seeds of a recipe end
BASELINE = "flow_grpo_long"  # whose passes to the target are those that others are compared with
START, END = "<!-- rows: written by --table -->", "<!-- end of rows -->"
SOME, SOME_END = "<!-- rows of ", "<!-- end of these rows -->"  # a short table of the recipes named
SUMMARIES = ("algorithms/index.md", "algorithms/fast.md")  # beside the folder of rows


def read_rows(folder: Path, max_passes: float | None, max_updates: int | None) -> list[Row]:
    """Return the rows that have this budget and the settings that their recipe has now.

    They are in the order of the recipes, learning rates and seeds.

    Args:
        folder: has a folder for each recipe.
        max_passes: the budget of rows; None for that of each recipe.
        max_updates: as in the rows.
    """
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in find_files(folder)]
    rows = [row | {"phase": find_phase(row["seed"])} for row in rows]  # whatever it was when the row was made

    def is_of_now(row: Row) -> bool:
        recipe = RECIPES.get(row["recipe"])
        if recipe is None or row["settings"] != recipe.settings:
            return False
        return (row["max_passes"], row["max_updates"]) == (max_passes or recipe.max_passes, max_updates)

    order = {name: place for place, name in enumerate(RECIPES)}
    return sorted(filter(is_of_now, rows), key=lambda row: (order[row["recipe"]], row["learning_rate"], row["seed"]))


def find_files(folder: Path) -> list[Path]:
    """Return the files of all finished rows; one that is still being written has another name."""
    return sorted(folder.glob("*/lr-*.json"))


def scored_reward(entry: dict[str, Any]) -> float:
    """Return the held-out reward of an evaluation, with the recipe's guidance where it has some."""
    return entry.get("guided", entry)["reward"]["mean"]


def score(row: Row) -> float:
    """Return the mean held-out reward over the passes of the budget: it counts how soon and how far a run gets.

    The trapezoids between evaluations are added up; what is left of the budget after the last update counts at the
    last evaluation's reward. A recipe that trains with guidance is scored with it.
    """
    points = [(entry["passes"], scored_reward(entry)) for entry in row["evaluations"]]
    points.append((max(row["max_passes"], points[-1][0]), points[-1][1]))
    area = sum((b - a) * (low + high) / 2 for (a, low), (b, high) in zip(points, points[1:]))
    return area / points[-1][0]


def tune_rows(rows: list[Row], recipe: str) -> dict[float, dict[int, Row]]:
    """Return the rows of a recipe's tuning by learning rate and seed; those of another if it is tuned as that one."""
    found = {rate: {} for rate in (LOWER_RATE, *LEARNING_RATES)}
    recipe = RECIPES[recipe].tuned_as or recipe
    for row in rows:
        if row["recipe"] == recipe and row["phase"] == "tune" and row["learning_rate"] in found:
            found[row["learning_rate"]][row["seed"]] = row
    return found


def first_scores(rows: list[Row], recipe: str) -> dict[float, float]:
    """Return the scores on the first tuning seed of the learning rates that have run on it."""
    found = tune_rows(rows, recipe)
    return {rate: score(own[TUNE_SEEDS[0]]) for rate, own in found.items() if TUNE_SEEDS[0] in own}


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
    found = tune_rows(rows, recipe)
    left = [rate for rate in choose_grid(rows, recipe) if TUNE_SEEDS[0] in found[rate]]
    for number, bound in enumerate(LEFT_BEHIND, start=1):
        if not all(found[rate].keys() >= set(TUNE_SEEDS[:number]) for rate in left):
            break
        scores = {rate: statistics.mean(score(found[rate][seed]) for seed in TUNE_SEEDS[:number]) for rate in left}
        left = [
            rate
            for rate in left
            if scores[rate] > max(scores.values()) - bound or found[rate].keys() >= set(TUNE_SEEDS)
        ]
    return left


def shared_tune_seeds(rows: list[Row], recipe: str) -> list[int]:
    """Return the tuning seeds on which all contenders of a recipe have run."""
    found, contenders = tune_rows(rows, recipe), find_contenders(rows, recipe)
    return [seed for seed in TUNE_SEEDS if contenders and all(seed in found[rate] for rate in contenders)]


def is_tuned(rows: list[Row], recipe: str) -> bool:
    """Tell whether all contenders of a recipe have run on all tuning seeds, or only one is left."""
    if not first_scores(rows, recipe).keys() >= set(choose_grid(rows, recipe)):
        return False
    return len(find_contenders(rows, recipe)) == 1 or len(shared_tune_seeds(rows, recipe)) == len(TUNE_SEEDS)


def choose_learning_rate(rows: list[Row], recipe: str) -> float | None:
    """Return the contender with the best mean score over the seeds that all contenders have; None without any."""
    found, seeds = tune_rows(rows, recipe), shared_tune_seeds(rows, recipe)
    return max(
        find_contenders(rows, recipe),
        key=lambda rate: statistics.mean(score(found[rate][seed]) for seed in seeds),
        default=None,
    )


def read_costs(folder: Path) -> dict[str, float]:
    """Return the CPU minutes of a pass of each recipe whose cost was measured with the settings that it has now.

    Args:
        folder: the rows' folder. Without a file of costs in it, there are none.
    """
    path = folder / COSTS
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))["recipes"]
    return {
        name: cost["cpu_seconds_per_pass"] / 60
        for name, cost in found.items()
        if name in RECIPES and cost["settings"] == RECIPES[name].settings
    }


def format_tables(rows: list[Row], costs: dict[str, float]) -> list[str]:
    """Return Markdown: the reported seeds, the tuning over the grid, and what each recipe is.

    Args:
        rows: as from [`read_rows`].
        costs: as from [`read_costs`].
    """
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    lines = ["## Reported seeds", "", *_report_table(rows, costs)]
    lines += [
        "",
        "## Tuning",
        "",
        *_tune_table(rows, [name for name in names if not RECIPES[name].tuned_as]),
        "",
        "## Recipes",
        "",
        *_recipe_table(rows, names),
    ]
    for key, title in (("machine", "Machines"), ("commit", "Commits")):
        lines += ["", f"{title}: " + ", ".join(sorted({row[key] for row in rows})) + "."]
    versions = sorted({f"{package} {version}" for row in rows for package, version in row["versions"].items()})
    return [*lines, "", f"Versions: {', '.join(versions)}."]


def _report_table(rows: list[Row], costs: dict[str, float]) -> list[str]:
    reported = [row for row in rows if row["phase"] == "report"]
    if not reported:
        return ["No row of this phase yet."]
    target = rows[0]["target"]
    head = ["recipe", "learning rate", "seeds", "passes per sample", "updates", "all passes"]
    head += ["held-out reward at the end", "Tesseract"]
    head += [f"passes to {target:g}", "evaluated every", f"of `{BASELINE}`", "CPU minutes"]
    lines = [_line(head), _line(["---"] * len(head))]
    baseline = {row["seed"]: row for row in choose_shown(rows, BASELINE)}
    for name, rate in dict.fromkeys((row["recipe"], row["learning_rate"]) for row in reported):
        own = [row for row in reported if (row["recipe"], row["learning_rate"]) == (name, rate)]
        cells = [f"`{name}`", f"{rate:g}", ", ".join(str(row["seed"]) for row in own)]
        cells += [format_range(own, key, kind) for key, kind in (("passes_per_sample", ".4g"), ("updates", "d"))]
        cells += [format_range(own, "passes", ".0f"), _list_ends(own, "reward"), _list_ends(own, "tesseract")]
        cells += [_list_crossings(own), format_range(own, "eval_passes", "g")]
        cells += [", ".join(format_share(row, baseline) for row in own)]
        passes = statistics.mean(row["passes"] for row in own)
        lines.append(_line([*cells, f"{passes * costs[name]:.1f}" if name in costs else "–"]))
    return [
        *lines,
        "",
        "Numbers separated by commas belong to the seeds, in this order. Where *to* stands between two, they are the",
        "smallest and the largest of the seeds. The more passes lie between evaluations (*evaluated every*), the more",
        f"*passes to {target:g}* are overstated. *Of `{BASELINE}`* is their share of those of `{BASELINE}`",
        f"on the same seed, at its better learning rate. Where that does not reach {target:g}, it is a bound from",
        "all of its passes. CPU minutes are all passes times the cost of one.",
        *_describe_chance(rows),
    ]


def spread_of_seeds(rows: list[Row], max_passes: float) -> tuple[int, float]:
    """Return how far the seeds of one recipe end apart, over all recipes with a budget that are reported.

    Each counts at the learning rate that is shown of it.

    Returns:
        The number of recipes, and the standard deviation between their seeds, pooled (root mean square).
    """
    names = dict.fromkeys(row["recipe"] for row in rows if row["max_passes"] == max_passes)
    shown = [choose_shown(rows, name) for name in names]
    ends = [[scored_reward(row["evaluations"][-1]) for row in own if row["phase"] == "report"] for own in shown]
    variances = [statistics.variance(own) for own in ends if len(own) > 1]
    return len(variances), statistics.mean(variances) ** 0.5 if variances else math.nan


def _describe_chance(rows: list[Row]) -> list[str]:
    found = {budget: spread_of_seeds(rows, budget) for budget in sorted({row["max_passes"] for row in rows})}
    lines = []
    for budget, (count, spread) in found.items():
        if count >= ENOUGH_RECIPES:
            bound = 1.96 * spread * (2 / len(REPORT_SEEDS)) ** 0.5  # of the difference of two means
            lines += [
                "",
                f"With a budget of {budget:g} passes, the seeds of a recipe end with a standard deviation of "
                f"{spread:.3f} (pooled over {count} recipes,",
                "at the learning rates shown). So the means of two equal recipes differ by less than "
                f"{bound:.3f} in 95 of 100 cases.",
            ]
    return lines


def format_range(rows: list[Row], key: str, kind: str) -> str:
    """Write a number of several rows: once where all have the same, else the smallest and the largest."""
    low, high = (format(pick(row[key] for row in rows), kind) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _list_crossings(rows: list[Row]) -> str:
    return ", ".join("–" if row["passes_to_target"] is None else f"{row['passes_to_target']:.0f}" for row in rows)


def _list_ends(rows: list[Row], name: str) -> str:
    """List a reward at the last evaluation of each seed, and also with the recipe's guidance where it has some."""

    def mean(entry: dict[str, Any]) -> str:
        found = entry["reward"] if name == "reward" else entry["rewards"].get(name)
        return "–" if found is None else f"{found['mean']:.3f}"

    ends = [row["evaluations"][-1] for row in rows]
    text = ", ".join(map(mean, ends))
    guided = ", ".join(mean(end["guided"]) for end in ends if "guided" in end)
    return f"{text} (guided {guided})" if guided else text


def format_share(row: Row, baseline: dict[int, Row]) -> str:
    """Write a row's passes to the target as a share of those of the baseline with the same seed."""
    if row["passes_to_target"] is None or row["seed"] not in baseline:
        return "–"
    other = baseline[row["seed"]]
    if other["passes_to_target"] is None:  # not reached within its budget
        return f"< {row['passes_to_target'] / other['max_passes']:.3f}"
    return f"{row['passes_to_target'] / other['passes_to_target']:.3f}"


def _tune_table(rows: list[Row], names: list[str]) -> list[str]:
    head = ["recipe", *(f"{rate:g}" for rate in (LOWER_RATE, *LEARNING_RATES)), "seeds"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name in names:
        best, contenders = choose_learning_rate(rows, name), find_contenders(rows, name)
        seeds, cells = shared_tune_seeds(rows, name), []
        for rate, found in tune_rows(rows, name).items():
            if rate in contenders:
                text = _format_tuned([found[seed] for seed in seeds])
                cells.append(f"**{text}**" if rate == best else text)
            else:
                own = [found[seed] for seed in TUNE_SEEDS if seed in found]
                cells.append(f"*{_format_tuned(own)}*" if own else "–")
        lines.append(_line([f"`{name}`", *cells, ", ".join(map(str, seeds)) or "–"]))
    tuned = [choose_learning_rate(rows, name) for name in names if is_tuned(rows, name)]
    return [
        *lines,
        "",
        "Each cell is the mean held-out reward over the budget's passes (the area under the curve), and in brackets",
        "the held-out reward at its end, both averaged over the seeds in the last column. The best of a line is bold.",
        "Recipes with guidance are scored with it.",
        "A cell is in italics if its rate did not run on all of these seeds, because it was too far below the best or",
        "because the seed is not finished. The tuning of a recipe ends when only one rate is left.",
        f"{LOWER_RATE:g} is tried only if {min(LEARNING_RATES):g} is the best of the other three on seed 0.",
        f"Of the {len(tuned)} recipes that are tuned, {tuned.count(max(LEARNING_RATES))} are best at the highest rate "
        f"and {tuned.count(LOWER_RATE)} at the lowest.",
        "For these, the best rate may lie outside the grid.",
    ]


def _format_tuned(rows: list[Row]) -> str:
    """Write the mean score of rows and, in brackets, their mean reward at the end."""
    end = statistics.mean(scored_reward(row["evaluations"][-1]) for row in rows)
    return f"{statistics.mean(map(score, rows)):.3f} ({end:.3f})"


def _recipe_table(rows: list[Row], names: list[str]) -> list[str]:
    lines = [_line(["recipe", "what it does", "settings that differ"]), _line(["---"] * 3)]
    for name in names:
        settings = next(row["settings"] for row in rows if row["recipe"] == name)
        changes = f"`{json.dumps(settings)}`" if settings else "none"
        lines.append(_line([f"`{name}`", RECIPES[name].summary, changes]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_tables(page: Path, rows: list[Row], costs: dict[str, float], plot: Path) -> None:
    """Write the tables into a page between its two marks, or make a page of them; show the plot if it is there."""
    text = page.read_text(encoding="utf-8") if page.is_file() else f"{START}\n{END}\n"
    before, _, rest = text.partition(START)
    after = _text_after(END, rest, page)
    lines = format_tables(rows, costs)
    if plot.is_file():
        lines = [f"![held-out reward against passes and CPU minutes]({plot.relative_to(page.parent)})", "", *lines]
    page.write_text("\n".join([before + START, "", *lines, "", END + after]), encoding="utf-8")


def _text_after(mark: str, text: str, page: Path) -> str:
    """Return what follows a mark.

    Raises:
        ValueError: the mark is not there, so nobody knows what the tables may replace.
    """
    _, found, after = text.partition(mark)
    if not found:
        raise ValueError(f"{page} has no {mark!r} where the tables end; add it, and write them again")
    return after


def write_summaries(page: Path, rows: list[Row]) -> None:
    """Write a short table after each mark on a page that names recipes, the best of those that have rows first."""
    known = {row["recipe"] for row in rows}
    before, *parts = page.read_text(encoding="utf-8").split(SOME)
    text = before
    for part in parts:
        names, _, rest = part.partition(" -->")
        lines = _summary_table(rows, [name for name in names.split(", ") if name in known])
        text += f"{SOME}{names} -->\n\n" + "\n".join(lines) + f"\n\n{SOME_END}" + _text_after(SOME_END, rest, page)
    page.write_text(text, encoding="utf-8")


def _summary_table(rows: list[Row], names: list[str]) -> list[str]:
    head = ["recipe", "what it does", "passes per sample", "learning rate", "seeds", "held-out reward at the end"]
    head += ["all passes", f"passes to {rows[0]['target']:g}", "evaluated every"]
    found = {name: choose_shown(rows, name) for name in names}
    end = {name: statistics.mean(row["evaluations"][-1]["reward"]["mean"] for row in found[name]) for name in names}
    lines = [_line(head), _line(["---"] * len(head))]
    for name in sorted(names, key=lambda name: -end[name]):
        own = found[name]
        cells = [f"`{name}`", RECIPES[name].summary, format_range(own, "passes_per_sample", ".3g")]
        cells += [f"{own[0]['learning_rate']:g}", ", ".join(str(row["seed"]) for row in own)]
        cells += [_list_ends(own, "reward"), format_range(own, "passes", ".0f"), _list_crossings(own)]
        lines.append(_line([*cells, format_range(own, "eval_passes", "g")]))
    return lines


def save_plot(path: Path, rows: list[Row], costs: dict[str, float]) -> None:
    """Draw held-out reward against passes and against CPU minutes, a line per recipe: the mean over its seeds.

    A band goes from the lowest to the highest seed. Recipes of each budget have two pictures beside each other, and a
    legend in the order of their ends; one that is tuned as another is left out. The reported seeds are drawn; of a
    recipe without any, the tuning seeds; of several learning rates the best. Recipes without a cost are drawn against
    passes only.
    """
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    from diffusion_grpo.run.plots import STYLE

    rows = [row for row in rows if not RECIPES[row["recipe"]].tuned_as]
    budgets = sorted({row["max_passes"] for row in rows}, reverse=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 4.6 * len(budgets)), layout="constrained")
        pictures = figure.subplots(len(budgets), 2, sharey="row", squeeze=False)
        for (left, right), budget in zip(pictures, budgets):
            own = [row for row in rows if row["max_passes"] == budget]
            curves = {name: read_curves(choose_shown(own, name)) for name in dict.fromkeys(r["recipe"] for r in own)}
            reported = {row["recipe"] for row in own if row["phase"] == "report"}
            for place, name in enumerate(sorted(curves, key=lambda name: -curves[name][1][:, -1].mean())):
                passes, values = curves[name]
                cost, color = costs.get(name), colormaps["tab10"](place % 10)
                style = {"color": color, "linestyle": ("-", "--", ":")[place // 10 % 3], "linewidth": 1.4}
                label = name if name in reported else f"{name} *"
                for axes, scale in ((left, 1.0), (right, cost)):
                    if scale:
                        axes.plot(scale * passes, values.mean(0), label=label, **style)
                        axes.fill_between(
                            scale * passes, values.min(0), values.max(0), color=color, alpha=0.1, linewidth=0
                        )
            left.set_xlabel("network passes per sample, summed over updates")
            left.set_ylabel("held-out reward")
            right.set_xlabel("CPU minutes of training")
            right.legend(
                *left.get_legend_handles_labels(),
                loc="upper left",
                bbox_to_anchor=(1.01, 1.0),
                fontsize=8,
                title=f"budget of {budget:g} passes" + ("\n(* tuning seeds)" if curves.keys() - reported else ""),
            )
            for axes in (left, right):
                axes.axhline(rows[0]["target"], color="#8a8f98", linewidth=0.8, linestyle=":")
                axes.set_xlim(left=0)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def read_curves(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return passes (evaluations,) and held-out rewards (rows, evaluations), at the passes of the first row."""
    curves = [np.array([(e["passes"], e["reward"]["mean"]) for e in row["evaluations"]]).T for row in rows]
    passes = curves[0][0]
    return passes, np.stack([np.interp(passes, *curve) for curve in curves])


def choose_shown(rows: list[Row], recipe: str) -> list[Row]:
    """Return the rows of a recipe that the plot shows: of the reported ones, else of all, those of one learning rate.

    This is the rate that tuning chose, if there are rows of it. If the recipe is not tuned (yet), or only as another
    one with a smaller budget, it is the best of those that have rows. The list is empty if the recipe has none.
    """
    own = [row for row in rows if row["recipe"] == recipe]
    own = [row for row in own if row["phase"] == "report"] or own
    found = {rate: [row for row in own if row["learning_rate"] == rate] for rate in [r["learning_rate"] for r in own]}
    is_own = not RECIPES[recipe].tuned_as and is_tuned(rows, recipe)
    tuned = choose_learning_rate(rows, recipe) if is_own else None
    return found.get(tuned) or max(found.values(), key=lambda same: statistics.mean(map(score, same)), default=[])
