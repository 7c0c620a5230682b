"""The documentation agrees with the code: settings, links, and the commands a reader is told to type."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
MADE_BY_RUNS = {"trainer_state.json", "train.yaml", "summary.json", "run.json", "manifest.json"}
OF_OTHERS = {"videos2caption.json", "validation.json"}


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_page_is_what_the_settings_say(build):
    assert build.CONFIG.read_text() == build.format_config_page(), "run make docs"


def test_command_line_page_is_what_the_parser_says(build):
    assert build.CLI.read_text() == build.format_cli_page(), "run make docs"
    assert "%(" not in build.CLI.read_text()  # argparse fills in the defaults that help texts name


def test_the_page_on_your_own_algorithm_shows_the_example():
    page = (ROOT / "docs" / "algorithms" / "own.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "own_algorithm.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```\n" in page


def test_every_own_setting_is_in_a_group(build):
    own = {name for _, names in build.group_fields(build.DiffusionGRPOConfig) for name in names}
    bases = [base for base in build.DiffusionGRPOConfig.__mro__ if base.__module__.startswith("diffusion_grpo.")]
    declared = {name for base in bases for name in vars(base).get("__annotations__", {})}
    assert len(bases) == 6 and declared - {"_VALID_DICT_FIELDS"} == own


def test_links_lead_somewhere(build):
    assert build.find_broken_links(build.PAGES) == []


def test_make_targets_that_the_docs_name_exist(build):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in build.PAGES:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
        assert set(named) <= targets, page


@pytest.mark.parametrize("page", [*OTHERS, *(str(path.relative_to(ROOT)) for path in PAGES)])
def test_files_that_a_page_names_exist(page):
    """By a path from the root, from the package or, of tests, by their name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`(?:python |pytest )?([\w./-]+\.(?:py|yaml|json|jinja))\b[^`]*`", text)
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    places = (ROOT, ROOT / "diffusion_grpo", ROOT / "examples")
    for name in set(named) - MADE_BY_RUNS - OF_OTHERS:
        assert name in tests or any((place / name).is_file() for place in places), name
