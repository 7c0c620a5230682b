"""
Race recipes by what they learn per network pass: `make bench-recipes` appends to benchmarks/recipe_rows.jsonl, and
writes the tables and the plot of docs/recipes.md.

Each recipe trains the embedded model with the demo's LoRA, prompts, groups, rewards and evaluation, until it has used
up its budget of network passes: what papers publish 1480, which is 40 updates of Flow-GRPO, most others a tenth of it.
Every (recipe, learning rate, seed) is one run in a process of its own and one line of the file; a line that is there
is not made again, so the race can be stopped and started at any time. First each recipe is tuned over the same
learning rates (seeds 0 to 2; a rate that is far behind on seed 0 is not tried on the others, and a lower one is added
where the lowest is best there), then its best one is reported (seeds 3 to 5). At the end, the CPU time of a pass of
each recipe is measured in a few updates.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipe_results import (
    PAGES,
    PLOT,
    ROWS,
    append_row,
    choose_grid,
    choose_learning_rate,
    find_contenders,
    format_table,
    is_tuned,
    read_costs,
    read_rows,
    save_plot,
    write_tables,
)
from recipe_settings import RECIPES, REPORT_SEEDS, TUNE_SEEDS, Recipe, find_unknown

SEEDS = {"tune": TUNE_SEEDS, "report": REPORT_SEEDS}
EVALUATIONS = 8  # of a run, after the one before its first update
REPORT_EVAL_PASSES = 74.0  # of a reported seed at most, to see where it crosses the target


def make_row(arguments: argparse.Namespace) -> None:
    """Train one row, or measure one cost, in this process."""
    from recipe_run import measure_cost, train_row

    from diffusion_grpo.quiet import hide_loading_bars

    hide_loading_bars("tiny")
    if arguments.cost:
        append_row(arguments.rows, measure_cost(RECIPES[arguments.cost]))
    else:
        name, rate, seed = arguments.row[0], float(arguments.row[1]), int(arguments.row[2])
        length = choose_length(arguments, RECIPES[name], seed)
        append_row(arguments.rows, train_row(RECIPES[name], rate, seed, **length))


def choose_length(arguments: argparse.Namespace, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return the length of a run of a recipe and how often it is evaluated."""
    passes = arguments.max_passes or recipe.max_passes
    eval_passes = min(passes / EVALUATIONS, REPORT_EVAL_PASSES) if seed in REPORT_SEEDS else passes / EVALUATIONS
    return {"max_passes": passes, "max_updates": arguments.max_updates, "eval_passes": eval_passes}


def run_phase(phase: str, recipes: list[Recipe], arguments: argparse.Namespace) -> list[str]:
    """Make the rows of a phase that are not there yet, and return what could not be made, a line each."""
    problems = []
    for recipe in recipes:
        if recipe.passes_per_update or (phase == "tune" and recipe.tuned_as):
            continue  # the former have no rate to be tuned, and are run by --row
        for seed in [seed for seed in SEEDS[phase] if seed in arguments.seeds]:
            problems += run_seed(recipe, seed, arguments)
    return problems


def run_seed(recipe: Recipe, seed: int, arguments: argparse.Namespace) -> list[str]:
    """Make the rows of a recipe and a seed that are not there yet."""
    problems, done = [], set()
    while True:  # a row may show that another learning rate is to be tried
        rows = read_rows(arguments.rows)
        rates = choose_rates(rows, recipe.name, seed)
        if rates is None:
            return [f"{recipe.name}, seed {seed}: not run, its tuning is not finished (--phase tune)"]
        if done.issuperset(rates):
            return problems
        made = {(row["recipe"], row["learning_rate"], row["seed"]) for row in rows}
        for rate in [rate for rate in rates if rate not in done]:
            if (recipe.name, rate, seed) not in made:
                problems += run_alone(arguments, "--row", recipe.name, f"{rate:g}", str(seed))
            done.add(rate)


def choose_rates(rows: list[dict[str, Any]], recipe: str, seed: int) -> list[float] | None:
    """Return the learning rates to run on a seed; None while rows of earlier seeds are lacking."""
    if seed == TUNE_SEEDS[0]:
        return list(choose_grid(rows, recipe))
    if seed in REPORT_SEEDS:
        return [choose_learning_rate(rows, recipe)] if is_tuned(rows, recipe) else None
    contenders = find_contenders(rows, recipe)
    if len(contenders) == 1:  # nothing is left to decide
        return []
    return contenders or None


def run_alone(arguments: argparse.Namespace, *words: str) -> list[str]:
    """Make one line of the file in a process of its own; return a line if that failed."""
    print(*words, flush=True)
    command = [sys.executable, __file__, *words, f"--rows={arguments.rows}"]
    command += [f"--max-passes={arguments.max_passes:g}"] if arguments.max_passes else []
    command += [f"--max-updates={arguments.max_updates}"] if arguments.max_updates else []
    ended = subprocess.run(command)
    return [f"{' '.join(words)}: the run ended with exit code {ended.returncode}"] if ended.returncode else []


def show_results(path: Path) -> None:
    """Write the plot and the tables of the pages; of other rows than the project's, print a table."""
    rows, costs = read_rows(path), read_costs(path)
    if path != ROWS:
        print(format_table(rows, costs, list(RECIPES)))
        return
    save_plot(PLOT, rows, costs)
    page = PAGES[0]  # the others quote numbers of it
    page.write_text(write_tables(page.read_text(encoding="utf-8"), rows, costs), encoding="utf-8")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--phase", choices=[*SEEDS, "costs"], help="only this one; default: all")
    help_text = "to train, separated by commas; default: all"
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(RECIPES), help=help_text)
    every = [*TUNE_SEEDS, *REPORT_SEEDS]
    parser.add_argument("--seeds", type=numbers, default=every, help="of the phases' seeds only these; default: all")
    parser.add_argument("--row", nargs=3, metavar=("RECIPE", "RATE", "SEED"), help="train one row in this process")
    parser.add_argument("--cost", metavar="RECIPE", help="measure what one recipe's pass costs in this process")
    help_text = "budget: network passes per sample of an update, summed over updates; default: each recipe's own"
    parser.add_argument("--max-passes", type=float, help=help_text)
    parser.add_argument("--max-updates", type=int, help="end each run after so many updates, to try it out")
    help_text = f"file that lines are added to; default: {ROWS.name}"
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE", help=help_text)
    parser.add_argument("--list", action="store_true", help="list the recipes and what this package lacks for them")
    parser.add_argument("--table", action="store_true", help="only write the tables and the plot")
    arguments = parser.parse_args(words)
    named = [*arguments.recipes, *(arguments.row or [])[:1], *filter(None, [arguments.cost])]
    if unknown := [name for name in named if name not in RECIPES]:
        parser.error(f"unknown recipe {unknown[0]!r}; --list shows them")
    if arguments.rows == ROWS and (arguments.max_passes or arguments.max_updates):
        parser.error("runs of another length need a file of their own: --rows FILE")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.list:
        for recipe in RECIPES.values():
            lacking = find_unknown(recipe)
            print(f"{recipe.name:<18} {recipe.summary}{f' [this package has {lacking}]' if lacking else ''}")
        return 0
    if arguments.row or arguments.cost:
        make_row(arguments)
        return 0
    problems = []
    if not arguments.table:
        lacking = {name: find_unknown(RECIPES[name]) for name in arguments.recipes}
        problems += [f"{name}: skipped, this package has {missing}" for name, missing in lacking.items() if missing]
        recipes = [RECIPES[name] for name in arguments.recipes if not lacking[name]]
        for phase in [arguments.phase] if arguments.phase else [*SEEDS, "costs"]:
            if phase in SEEDS:
                problems += run_phase(phase, recipes, arguments)
            else:
                known = read_costs(arguments.rows)
                for recipe in [recipe for recipe in recipes if recipe.name not in known]:
                    problems += run_alone(arguments, "--cost", recipe.name)
    show_results(arguments.rows)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
