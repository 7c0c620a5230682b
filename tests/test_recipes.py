"""Pages show what the rows of the race of recipes say."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import recipe_results
from recipe_settings import FRESH_SEEDS, RECIPES, REPORT_SEEDS, TUNE_SEEDS

ROWS = recipe_results.read_rows(recipe_results.ROWS)
COSTS = recipe_results.read_costs(recipe_results.ROWS)
PAGES = recipe_results.PAGES
LAST_SEEDS = (6, 7, 8)  # of the winner, which ran when learning rates and everything else were fixed


def test_tables_of_the_race_are_those_of_the_rows():
    text = PAGES[0].read_text(encoding="utf-8")
    emptied, tables = recipe_results.TABLE.subn(r"\1\n\3", text)
    assert tables and recipe_results.write_tables(emptied, ROWS, COSTS) == text, "run benchmarks/recipes.py --table"


def read_text(page):
    """Return a page without the tables that are written from the rows, and without line breaks."""
    return " ".join(recipe_results.TABLE.sub("", page.read_text(encoding="utf-8")).split())


def reported_means():
    """Return the mean reward at the end of each recipe's reported seeds."""
    shown = [recipe_results.choose_shown(ROWS, name) for name in RECIPES]
    return {f"{recipe_results.mean_end(rows):.3f}" for rows in shown if rows}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_three_numbers_in_a_sentence_are_those_of_three_rows(page):
    known = set()
    runs = [(row["recipe"], row["learning_rate"], row["max_passes"]) for row in ROWS]
    for run in {*runs}:
        rows = [row for row, of_row in zip(ROWS, runs, strict=True) if of_row == run]
        for seeds in (TUNE_SEEDS, REPORT_SEEDS, LAST_SEEDS, FRESH_SEEDS):
            curves = [row["curves"] for row in rows if row["seed"] in seeds]
            for key in curves[0] if len(curves) == 3 else ():
                known |= {tuple(f"{curve[key][at]:.3f}" for curve in curves) for at in (0, -1)}
    quoted = re.findall(r"(\d\.\d{3}), (\d\.\d{3}),? and (\d\.\d{3})", read_text(page))
    assert not [three for three in quoted if three not in known and set(three) - reported_means()]


def test_what_chance_does_is_computed_from_the_rows():
    said = [re.search(rf"(0\.\d+)\s+with\s+{budget}", read_text(PAGES[0]))[1] for budget in ("1480 passes", "148,")]
    assert said == [f"{recipe_results.bound_chance(ROWS, budget):.3f}" for budget in (1480, 148)]


def test_the_numbers_beside_the_choices_are_means_of_the_reported_seeds():
    (_, table) = PAGES[1].read_text(encoding="utf-8").split("## When something else")
    cells = [line.split("|")[3] for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    numbers = {number for cell in cells for number in re.findall(r"0\.\d{3}", cell)}
    assert numbers and not numbers - reported_means()
