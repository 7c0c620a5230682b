"""The tables of what fits on one card are on their pages, and are what the plan says."""

import re
from pathlib import Path

import pytest

from benchmarks.card_sizes import CARDS, CASES, fit_case, make_table

ROOT = Path(__file__).parent.parent


def read_page(name):
    return (ROOT / "docs" / "models" / f"{CASES[name].page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_each_page_has_its_table(name):
    """With a row per card; what is said to fit leaves the reserve free, and the rest does not."""
    table = re.search(rf"<!-- sizes: {re.escape(name)} -->\n\n(.*?)\n<!-- end -->", read_page(name), re.DOTALL)[1]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"{card} GB" for card in CARDS]
    for column in (1, 2):
        for row, card in zip(rows, CARDS, strict=True):
            is_fitting = float(re.search(r"([\d.]+) GiB", row[column])[1]) <= 0.92 * card + 0.05  # as rounded
            assert is_fitting == (not row[column].startswith("no"))
    assert (ROOT / "examples" / f"{CASES[name].example}.yaml").is_file()


@pytest.mark.slow
def test_a_table_is_what_the_plan_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    name = "Wan2.2-TI2V-5B"
    assert make_table(name, fit_case(name, is_lora=True), fit_case(name, is_lora=False)) in read_page(name)


def test_the_page_on_memory_says_what_the_examples_say():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for file in (ROOT / "examples" / "24gb").glob("*.yaml"):
        said = re.search(r"# Planned: at most ([\d.]+) GiB", file.read_text())[1]
        row = next(line for line in page.splitlines() if line.startswith(f"| `24gb/{file.name}`"))
        cells = row.strip("| ").split(" | ")
        assert cells[-1] == said == f"{max(map(float, cells[3:7])):.1f}"
