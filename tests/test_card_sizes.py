"""What fits on one card is on the pages as the plan says it."""

import re
from pathlib import Path

import pytest

from benchmarks.card_sizes import CASES, fit_case, make_table

ROOT = Path(__file__).parent.parent


def read_page(name):
    return (ROOT / "docs" / "models" / f"{CASES[name].page}.md").read_text(encoding="utf-8")


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
