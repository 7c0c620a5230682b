"""The site builds without a network and without a warning, and a broken link or reference stops the build."""

import html
import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
ROOT = Path(__file__).parent.parent
pytest.importorskip("material", reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def build():
    """Builds a folder of pages: `build(docs_dir, site_dir)`."""
    from mkdocs.commands.build import build as run
    from mkdocs.config import load_config

    def build(site: Path, docs: Path | None = None) -> Path:
        changes = {} if docs is None else {"docs_dir": str(docs), "nav": None, "not_in_nav": "*"}
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True, **changes)
        config.plugins.on_startup(command="build", dirty=False)
        run(config)
        return site

    return build


@pytest.fixture(scope="module")
def site(build, tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


def test_every_page_is_built(site):
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.is_file(), page


def test_every_picture_of_a_page_is_built(site):
    pictures = set()
    for page in site.rglob("*.html"):
        for source in re.findall(r'<img[^>]* src="([^"]+)"', page.read_text()):
            if not source.startswith("data:"):
                assert (page.parent / source).is_file(), f"{page.relative_to(site)}: {source}"
                pictures.add(Path(source).name)
    assert "race.png" in pictures
    assert not list(site.rglob("lr-*.json"))  # the rows of the race are not pages


def test_nothing_is_loaded_from_other_servers(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"((?:https?:)?//[^\"]+)", page.read_text())
        assert not loaded, page


def test_formulas_are_mathml(site):
    text = (site / "algorithms" / "nft.html").read_text()
    assert text.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 2
    for page in site.rglob("*.html"):
        assert 'class="arithmatex"' not in page.read_text(), page


def test_a_link_to_a_file_of_the_repository_shows_the_file(site):
    page = (site / "quickstart.html").read_text()
    assert 'href="source/examples/train.py.html"' in page
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "source" / "examples" / "train.py.html").read_text()))
    assert (ROOT / "examples" / "train.py").read_text().splitlines()[0] in shown


def test_the_notebook_has_a_page_with_its_outputs(site):
    folder = site / "source" / "examples"
    page = html.unescape((folder / "quickstart.ipynb.html").read_text())
    assert re.search(r">Reward \S+ ± \S+ before training, \S+ ± \S+ after 12 updates", page)
    assert "12 of 12 updates</" in re.sub(r"\s+", " ", page)  # the table that a notebook shows while it trains
    images = re.findall(r'<img[^>]*src="(output_[^"]+)"', page)
    assert len(images) == 3 and all((folder / image).stat().st_size > 1000 for image in images)


BROKEN = ("gone.md", "#gone", "../gone.py", "diffusion_grpo.gone", "diffusion_grpo.lost")


def test_a_broken_link_or_reference_stops_the_build(build, tmp_path, caplog):
    from mkdocs.exceptions import Abort

    page, anchor, file, name, thing = BROKEN
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[a]({page}) [b]({anchor}) [c]({file}) [`d`][{name}]\n")
    with pytest.raises(Abort):
        build(tmp_path / "site", tmp_path / "docs")
    assert all(target in caplog.text for target in BROKEN[:4]), caplog.text
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n::: {thing}\n")
    with pytest.raises(Abort):
        build(tmp_path / "site", tmp_path / "docs")
    assert thing in caplog.text


def test_a_formula_that_would_show_as_text_stops_the_build(build, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n$$ \\unknowncommand{x} $$\n")
    with pytest.raises(Exception, match="does not know"):
        build(tmp_path / "site", tmp_path / "docs")
