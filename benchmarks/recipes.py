"""
Race recipes by what they learn per network pass: `make bench-recipes` writes docs/recipes/ and docs/recipes.md.

Each recipe trains the embedded model with the demo's LoRA, prompts, groups, rewards and evaluation, until it has used
up its budget of network passes: what papers publish 1480, which is 40 updates of Flow-GRPO, the others a tenth of it.
Every (recipe, learning rate, seed) is one run in a process of its own and one JSON file; a file that is there is not
made again, so the race can be stopped and started at any time. First each recipe is tuned over the same learning rates
(seeds 0 to 2; a rate that is far behind on seed 0 is not tried on the others, and a lower one is added where the
lowest is best there), then its best one is reported (seeds 3 to 5). At the end, the CPU time of a pass of each recipe
is measured in a few updates, for all recipes on one machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipe_results import (
    COSTS,
    SUMMARIES,
    choose_grid,
    choose_learning_rate,
    find_contenders,
    find_files,
    is_tuned,
    read_costs,
    read_rows,
    save_plot,
    write_summaries,
    write_tables,
)
from recipe_settings import RECIPES, REPORT_SEEDS, TUNE_SEEDS, Recipe, find_unknown

ROOT = Path(__file__).parent.parent
SEEDS = {"tune": TUNE_SEEDS, "report": REPORT_SEEDS}
EVALUATIONS = 8  # of a run, after the one before its first update
REPORT_EVAL_PASSES = 74.0  # of a reported seed at most, to see where it crosses the target
SAME = ("settings", "max_passes", "max_updates")  # of a row and of the run that would make it


def row_path(folder: Path, recipe: str, learning_rate: float, seed: int) -> Path:
    """Return the file of a row."""
    return folder / recipe / f"lr-{learning_rate:g}-seed-{seed}.json"


def find_difference(path: Path, wanted: dict[str, Any]) -> str | None:
    """Say in what a row that is there differs from the run that would make it; None if in nothing."""
    row = json.loads(path.read_text(encoding="utf-8"))
    for key in SAME:
        if row[key] != wanted[key]:
            return f"{path} was made with {key} {row[key]}, now {wanted[key]}; delete it to make it again"
    return None


def make_row(arguments: argparse.Namespace) -> None:
    """Train one row in this process, and write it once it is whole."""
    from recipe_run import train_row

    from diffusion_grpo.cli.inputs import hide_loading_bars
    from diffusion_grpo.run.records import write_json

    name, rate, seed = arguments.row
    path = row_path(arguments.out, name, rate, seed)
    if path.exists():
        sys.exit(f"{path} is there already; delete it, or write the new row to another folder with --out.")
    hide_loading_bars("tiny")
    length = budget(arguments, RECIPES[name], seed)
    row = train_row(RECIPES[name], rate, seed, **length, sizes=change_sizes(arguments))
    if arguments.without_tesseract:
        row["command"] += " --without-tesseract"
    write_json(path, row)


def change_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a run that the command line changes."""
    return {"eval_reward_funcs": None} if arguments.without_tesseract else {}


def budget(arguments: argparse.Namespace, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return the length of a run of a recipe and how often it is evaluated."""
    passes = arguments.max_passes or recipe.max_passes
    often = min(passes / EVALUATIONS, REPORT_EVAL_PASSES) if seed in REPORT_SEEDS else passes / EVALUATIONS
    return {
        "max_passes": passes,
        "max_updates": arguments.max_updates,
        "eval_passes": arguments.eval_passes or often,
    }


def run_phase(phase: str, recipes: list[Recipe], arguments: argparse.Namespace) -> list[str]:
    """Make the rows of a phase that are not there yet.

    Returns:
        what could not be made, a line each.
    """
    problems = []
    for recipe in recipes:
        if phase == "tune" and recipe.tuned_as:
            continue
        for seed in [seed for seed in SEEDS[phase] if seed in arguments.seeds]:
            problems += run_seed(recipe, seed, arguments)
    return problems


def run_seed(recipe: Recipe, seed: int, arguments: argparse.Namespace) -> list[str]:
    """Make the rows of a recipe and a seed that are not there yet."""
    problems, done = [], set()
    while True:  # a row may show that another learning rate is to be tried
        rates = choose_rates(read_rows(arguments.out, arguments.max_passes, arguments.max_updates), recipe.name, seed)
        if rates is None:
            return [f"{recipe.name}, seed {seed}: not run, its tuning is not finished (--phase tune)"]
        if done.issuperset(rates):
            return problems
        for rate in [rate for rate in rates if rate not in done]:
            problems += run_row(recipe, rate, seed, arguments)
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


def run_row(recipe: Recipe, rate: float, seed: int, arguments: argparse.Namespace) -> list[str]:
    """Make one row in a process of its own, unless it is there."""
    path, length = row_path(arguments.out, recipe.name, rate, seed), budget(arguments, recipe, seed)
    if path.is_file():
        difference = find_difference(path, length | {"settings": recipe.settings})
        return [] if difference is None else [difference]
    print(f"{recipe.name}, learning rate {rate:g}, seed {seed}", flush=True)
    words = ["--row", recipe.name, f"{rate:g}", str(seed), "--out", str(arguments.out)]
    words += [f"--max-passes={length['max_passes']:g}", f"--eval-passes={length['eval_passes']:g}"]
    words += [f"--max-updates={arguments.max_updates}"] if arguments.max_updates else []
    words += ["--without-tesseract"] if arguments.without_tesseract else []
    done = subprocess.run([sys.executable, __file__, *words])
    return [f"{path}: the run ended with exit code {done.returncode}"] if done.returncode else []


def make_costs(recipes: list[Recipe], arguments: argparse.Namespace) -> list[str]:
    """Measure what a pass of each recipe costs, where that is not known yet, in a process of its own.

    Returns:
        what could not be measured, after which the rest is not tried.
    """
    known, problems = read_costs(arguments.out), []
    for recipe in [recipe for recipe in recipes if recipe.name not in known]:
        print(f"{recipe.name}, cost of a pass", flush=True)
        words = ["--cost", recipe.name, "--out", str(arguments.out)]
        words += ["--without-tesseract"] if arguments.without_tesseract else []
        done = subprocess.run([sys.executable, __file__, *words])
        if done.returncode:  # on another machine, all would fail
            problems.append(f"{recipe.name}, cost of a pass: ended with exit code {done.returncode}")
            break
    return problems


def make_cost(arguments: argparse.Namespace) -> None:
    """Measure what a pass of one recipe costs in this process, and add it to the file of costs.

    Raises:
        SystemExit: the file has costs of another machine.
    """
    from recipe_run import describe_machine, measure_cost

    from diffusion_grpo.cli.inputs import hide_loading_bars
    from diffusion_grpo.run.records import write_json

    path, here = arguments.out / COSTS, describe_machine()

    def read() -> dict[str, Any]:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else here | {"recipes": {}}

    found = read()
    for key, value in here.items():
        if found[key] != value:
            sys.exit(f"{path} was measured with {key} {found[key]}, now {value}; delete it to measure all here.")
    hide_loading_bars("tiny")
    measured = measure_cost(RECIPES[arguments.cost], change_sizes(arguments))
    costs = read()["recipes"] | {arguments.cost: measured}  # another process may have added some meanwhile
    write_json(path, here | {"recipes": {name: costs[name] for name in RECIPES if name in costs}})


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--phase", choices=SEEDS, help="only this one; default: tune, report and --costs")
    parser.add_argument(
        "--recipes", type=names, default=list(RECIPES), help="to train, separated by commas; default: all"
    )
    every = [*TUNE_SEEDS, *REPORT_SEEDS]
    parser.add_argument("--seeds", type=numbers, default=every, help="of the phases' seeds only these; default: all")
    parser.add_argument("--row", nargs=3, metavar=("RECIPE", "RATE", "SEED"), help="train one row in this process")
    help_text = "do not measure the reward `tesseract`; learning rates are not tuned on it"
    parser.add_argument("--without-tesseract", action="store_true", help=help_text)
    parser.add_argument("--costs", action="store_true", help="only measure what a pass costs, where not known yet")
    parser.add_argument("--cost", metavar="RECIPE", help="measure what one recipe's pass costs in this process")
    help_text = "budget: network passes per sample of an update, summed over updates; default: each recipe's own"
    parser.add_argument("--max-passes", type=float, help=help_text)
    parser.add_argument("--max-updates", type=int, help="end each run after so many updates, to try it out")
    help_text = f"evaluate each time so many passes are used up; default: a part in {EVALUATIONS} of the budget"
    help_text += f", for reported seeds {REPORT_EVAL_PASSES:g} at most"
    parser.add_argument("--eval-passes", type=float, help=help_text)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "recipes", help="folder; default: docs/recipes")
    parser.add_argument("--list", action="store_true", help="list the recipes and what this package lacks for them")
    parser.add_argument("--table", action="store_true", help="only write the tables to OUT.md, and print them")
    parser.add_argument("--plot", action="store_true", help="only draw OUT/race.png")
    arguments = parser.parse_args(words)
    named = [*arguments.recipes, *(arguments.row or [])[:1], *filter(None, [arguments.cost])]
    if unknown := [name for name in named if name not in RECIPES]:
        parser.error(f"unknown recipe {unknown[0]!r}; --list shows them")
    if arguments.row:
        name, rate, seed = arguments.row
        try:
            arguments.row = name, float(rate), int(seed)
        except ValueError:
            parser.error(
                f"--row takes a recipe, a learning rate and a whole number as seed, got {' '.join(arguments.row)}"
            )
    if unknown := [seed for seed in arguments.seeds if seed not in every]:
        parser.error(f"seed {unknown[0]} belongs to no phase; --row trains with any seed")
    return arguments


def show_results(arguments: argparse.Namespace, table: bool, plot: bool) -> None:
    """Write the plot and the tables of the rows that are there."""
    rows = read_rows(arguments.out, arguments.max_passes, arguments.max_updates)
    others = len(find_files(arguments.out)) - len(rows)
    left_out = f"; rows of other budgets or settings that are left out: {others}" if others else ""
    print(f"Rows of this budget in {arguments.out}: {len(rows)}{left_out}.")
    if not rows:
        return
    costs = read_costs(arguments.out)
    image, page = arguments.out / "race.png", arguments.out.with_name(f"{arguments.out.name}.md")
    if plot:
        save_plot(image, rows, costs)
        print(f"Plot: {image}")
    if table:
        write_tables(page, rows, costs, image)
        for summary in (page, *(arguments.out.parent / name for name in SUMMARIES)):
            if summary.is_file():
                write_summaries(summary, rows)
        print(page.read_text(encoding="utf-8"), f"Page: {page}", sep="\n")


def refuse_unknown(name: str) -> None:
    """End the program if this package lacks something that a recipe needs."""
    if lacking := find_unknown(RECIPES[name]):
        sys.exit(f"{name} cannot be trained: this package has {lacking}.")


def main() -> int:
    arguments = parse()
    if arguments.list:
        for recipe in RECIPES.values():
            lacking = find_unknown(recipe)
            print(f"{recipe.name:<18} {recipe.summary}{f' [this package has {lacking}]' if lacking else ''}")
        return 0
    if arguments.cost:
        refuse_unknown(arguments.cost)
        make_cost(arguments)
        return 0
    if arguments.row:
        refuse_unknown(arguments.row[0])
        make_row(arguments)
        return 0
    if arguments.table or arguments.plot:
        show_results(arguments, arguments.table, arguments.plot)
        return 0
    recipes = []
    for name in arguments.recipes:
        lacking = find_unknown(RECIPES[name])
        if lacking:
            print(f"{name}: skipped, this package has {lacking}")
        else:
            recipes.append(RECIPES[name])
    phases = [] if arguments.costs else [arguments.phase] if arguments.phase else SEEDS
    problems = [line for phase in phases for line in run_phase(phase, recipes, arguments)]
    if arguments.costs or not arguments.phase and not arguments.max_updates:
        problems += make_costs(recipes, arguments)
    show_results(arguments, table=True, plot=True)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
