"""The documentation agrees with the code: settings, links, and the commands a reader is told to type."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_page_is_what_the_settings_say(build):
    assert build.CONFIG.read_text() == build.config_page(), "run make docs"


def test_every_own_setting_is_in_a_group(build):
    own = {name for _, names in build.groups(build.DiffusionGRPOConfig) for name in names}
    bases = [base for base in build.DiffusionGRPOConfig.__mro__ if base.__module__.startswith("diffusion_grpo.")]
    declared = {name for base in bases for name in base.__annotations__}
    assert len(bases) == 4 and declared - {"_VALID_DICT_FIELDS"} == own


def test_links_lead_somewhere(build):
    assert build.broken_links(build.PAGES) == []


def test_a_broken_link_is_found(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("# One\n[a](#one) [b](other.md) [c](#two) [d](https://example.org)")
    assert build.broken_links([tmp_path / "page.md"]) == ["page.md: other.md", "page.md: #two"]


def test_make_targets_that_the_docs_name_exist(build):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in build.PAGES:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
        assert set(named) <= targets, page
