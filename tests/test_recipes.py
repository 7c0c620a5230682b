"""The race of recipes counts passes rightly, and pages show what its rows say."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import recipe_results
import recipe_run
import recipe_settings
from recipe_settings import RECIPES, REPORT_SEEDS, TUNE_SEEDS, Recipe

ROWS = recipe_results.read_rows(recipe_results.ROWS)
COSTS = recipe_results.read_costs(recipe_results.ROWS)
PAGES = recipe_results.PAGES
FRESH_SEEDS = (6, 7, 8)  # of the winner: they ran when its learning rate and everything else was fixed
SMALL = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2}
SMALL |= {"eval_max_prompts": 2}
BUDGET = {"max_passes": 100.0, "eval_passes": 9.0}
CLEAN = {key: value for key, value in recipe_settings.CLEAN.items() if key != "num_inference_steps"}
FIRST = 1 / 4  # the first call is made once for the four samples of an initial latent


def made_row(recipe, rate, seed, rewards):
    """A row of a run of 100 passes, with evaluations evenly spread over them."""
    passes = np.linspace(0, 100, len(rewards)).tolist()
    row = {"recipe": recipe, "learning_rate": rate, "seed": seed, "max_passes": 100.0, "updates": 10}
    return row | {"curves": {"passes": passes, "reward": rewards}}


# rollout + 3 per trained step (4 with checkpointing), all twice with guidance; a reference adds 1 per trained step
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"trained_steps": [0, 1]}, FIRST + 5 + 3 * FIRST),
        ({"trained_steps": [0, 1], "gradient_checkpointing": True}, FIRST + 5 + 4 * FIRST),
        ({"trained_steps": [0, 1], "guidance_scale": 2.0}, 2 * (FIRST + 5 + 3 * FIRST)),
        ({"trained_steps": [0, 2], "beta": 0.01}, FIRST + 5 + 3 * (FIRST + 1) + FIRST + 1),
        ({"trained_steps": [0, 1], "num_iterations": 2}, (FIRST + 5) / 2 + 3 * FIRST),
        (CLEAN | {"loss_type": "dpo", "trained_steps": [1, 4], "best_of_n": 2}, 6 + 3 * (3 + 1) / 2),
    ],
)
def test_network_passes_are_those_counted_by_hand(settings, passes):
    budget = BUDGET | {"max_updates": settings.get("num_iterations", 1)}
    recipe = Recipe("mine", "", {"num_inference_steps": 6} | settings)
    row = recipe_run.train_row(recipe, 1.1e-3, 0, **budget, sizes=SMALL)
    assert row["curves"]["passes"][-1] / row["updates"] == passes
    assert ("guided" in row["curves"]) == ("guidance_scale" in settings)


def test_scores_are_areas_and_crossings_are_interpolated():
    row = made_row("demo", 1e-3, 0, [0.7, 0.9, 0.8])
    assert recipe_results.score(row) == pytest.approx((0.8 + 0.85) / 2)
    assert recipe_results.score(row | {"max_passes": 200.0}) == pytest.approx((0.8 + 0.85 + 2 * 0.8) / 4)
    assert recipe_results.find_crossing(row) == pytest.approx(40)
    assert recipe_results.find_crossing(made_row("demo", 1e-3, 0, [0.7, 0.8])) is None


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_recipe_has_valid_settings_and_leaves_alone_what_all_share(recipe, tmp_path):
    assert not recipe.settings.keys() & recipe_settings.SHARED
    if recipe_settings.find_unknown(recipe) is None:
        *_, config = recipe_run.parse_recipe(recipe, 1e-3, 0, str(tmp_path))
        assert recipe_run.count_samples(config) == 128


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
    for name, rate in {(row["recipe"], row["learning_rate"]) for row in ROWS}:
        rows = [row for row in ROWS if (row["recipe"], row["learning_rate"]) == (name, rate)]
        for seeds in (TUNE_SEEDS, REPORT_SEEDS, FRESH_SEEDS):
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
