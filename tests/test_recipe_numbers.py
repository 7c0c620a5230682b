"""The numbers that pages quote from the race of recipes are those of its rows."""

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import recipe_results
from recipe_settings import RECIPES, REPORT_SEEDS, TUNE_SEEDS

ROOT = Path(__file__).parent.parent
PAGES = ("recipes.md", "algorithms/index.md", "algorithms/fast.md")
FRESH_SEEDS = (6, 7, 8)  # of the winner: they ran when its learning rate and everything else was fixed
THREE = re.compile(r"(\d\.\d{2,3}), (\d\.\d{2,3}),? and\s+(\d\.\d{2,3})")


@pytest.fixture(scope="module")
def rows():
    return recipe_results.read_rows(ROOT / "docs" / "recipes", None, None)


def rewards_of(entry: dict) -> Iterator[float]:
    """Yield the means of an evaluation: of the reward, of its parts, and of both with guidance."""
    yield entry["reward"]["mean"]
    yield from (reward["mean"] for reward in entry["rewards"].values())
    yield from rewards_of(entry["guided"]) if "guided" in entry else ()


def threes(rows: list[dict]) -> set[tuple[str, ...]]:
    """Return each reward of three rows, before the first update and at the end, with two and three digits."""
    found = set()
    for at in (0, -1):
        for three in zip(*(rewards_of(row["evaluations"][at]) for row in rows), strict=True):
            found |= {tuple(f"{reward:.{digits}f}" for reward in three) for digits in (2, 3)}
    return found


def text_of(page: str) -> str:
    """Return a page without the tables that are written from the rows, and without line breaks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(recipe_results.START)[0]
    text = re.sub(f"{recipe_results.SOME}.*?{recipe_results.SOME_END}", "", text, flags=re.DOTALL)
    return " ".join(text.split())


def means(rows: list[dict]) -> dict[str, str]:
    """Return the mean reward at the end of each recipe's reported seeds."""
    shown = {name: recipe_results.choose_shown(rows, name) for name in RECIPES}
    return {
        name: f"{statistics.mean(row['evaluations'][-1]['reward']['mean'] for row in own):.3f}"
        for name, own in shown.items()
        if own  # not reported yet
    }


def means_of_six(rows: list[dict]) -> set[str]:
    """Return the mean reward at the end of each recipe over all seeds, at the learning rate that tuning chose."""
    found = set()
    for name in RECIPES:
        rate = recipe_results.choose_learning_rate(rows, name)
        own = [row for row in rows if (row["recipe"], row["learning_rate"]) == (name, rate)]
        own = [row for row in own if row["seed"] in (*TUNE_SEEDS, *REPORT_SEEDS)]
        if len(own) == 6:
            found.add(f"{statistics.mean(row['evaluations'][-1]['reward']['mean'] for row in own):.3f}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_numbers_over_six_seeds_are_means_of_rows(page, rows):
    """A sentence that says `six seeds` has no other number of that kind before its next full stop."""
    sentences = [part for part in re.split(r"\.\s|: ", text_of(page)) if "six seeds" in part]
    quoted = {number for part in sentences for number in re.findall(r"0\.[5-9]\d\d", part)}
    assert not quoted - means_of_six(rows)
    assert page != "recipes.md" or len(quoted) > 5


@pytest.mark.parametrize("page", PAGES)
def test_three_numbers_in_a_sentence_are_those_of_three_rows(page, rows):
    known = set()
    for name in RECIPES:
        own = [row for row in rows if row["recipe"] == name]
        for rate in {row["learning_rate"] for row in own}:
            same = [row for row in own if row["learning_rate"] == rate]
            for seeds in (TUNE_SEEDS, REPORT_SEEDS, FRESH_SEEDS):
                some = [row for row in same if row["seed"] in seeds]
                known |= threes(some) if len(some) == 3 else set()
        known |= threes([row for row in own if row["seed"] == TUNE_SEEDS[0]])  # over the learning rates
    of_recipes = set(means(rows).values())
    unknown = [three for three in THREE.findall(text_of(page)) if three not in known and set(three) - of_recipes]
    assert not unknown


def test_the_numbers_beside_the_choices_are_means_of_the_reported_seeds(rows):
    (_, table) = (
        (ROOT / "docs" / "algorithms" / "index.md").read_text(encoding="utf-8").split("## When something else")
    )
    cells = [line.split("|")[3] for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    numbers = [number for cell in cells for number in re.findall(r"0\.\d{3}", cell)]
    assert len(numbers) > 10 and not set(numbers) - set(means(rows).values())
