"""The site builds without a network and without a warning: a broken link, reference or formula stops the build."""

import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
ROOT = Path(__file__).parent.parent
pytest.importorskip("material", reason="the extra docs is not installed")
pytestmark = pytest.mark.slow  # `make docs` builds it too, and `test_docs.py` looks for broken links


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_every_page_and_picture_is_built_and_nothing_is_loaded_from_other_servers(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    for page in site.rglob("*.html"):
        text = page.read_text()
        for source in re.findall(r'<img[^>]* src="([^"]+)"', text):
            assert source.startswith("data:") or (page.parent / source).is_file(), f"{page}: {source}"
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"((?:https?:)?//[^\"]+)", text), page
        assert 'class="arithmatex"' not in text, page  # formulas are MathML
