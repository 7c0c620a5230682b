"""Hooks of mkdocs: formulas become MathML, and what a page links to outside docs/ becomes a page of its source.

Both keep the site whole without a network: browsers draw MathML without JavaScript, and a link from a page to
`examples/demo.yaml` leads somewhere on the site as it does in the repository. A notebook's page shows its outputs.
"""

import ast
import html
import os
import re
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CODE = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
SEARCH_BOOSTS = {"rewards/own.md": 4, "troubleshooting.md": 4}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file or folder outside docs/ that a page links to."""
    targets = set()
    for page in files.documentation_pages():
        text = CODE.sub("", Path(page.abs_src_path).read_text(encoding="utf-8"))
        targets |= {find_source(page.src_uri, link[1]) for link in LINK.finditer(text)} - {None}
    for target in sorted(targets):
        if target.suffix == ".ipynb":
            content, images = convert_notebook(target)
        else:
            content, images = format_source(target), {}
        page = name_source_page(target)
        files.append(File.generated(config, page, content=content))
        for name, image in images.items():
            files.append(File.generated(config, str(PurePosixPath(page).parent / name), content=image))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their pages, and the search to guides before the API."""
    page.meta["search"] = {"boost": SEARCH_BOOSTS.get(page.file.src_uri, 0.2 if "api/" in page.file.src_uri else 1)}

    def lead(link: re.Match) -> str:
        target = find_source(page.file.src_uri, link[1])
        if target is None:
            return link[0]
        start = PurePosixPath(page.file.src_uri).parent
        return f"]({os.path.relpath(name_source_page(target), start)})"

    return LINK.sub(lead, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace LaTeX by MathML.

    Raises:
        ValueError: a command that the converter does not know, and would show as text.
    """

    def draw(formula: re.Match) -> str:
        latex = html.unescape(formula[2]).strip()
        drawn = convert(latex, display="block" if formula[1] == "div" else "inline")
        if unknown := re.search(r">\\(\w+)", drawn):
            raise ValueError(f"{page.file.src_uri}: the converter does not know \\{unknown[1]} in {latex}")
        return drawn

    return FORMULA.sub(draw, content)


def find_source(page: str, link: str) -> Path | None:
    """Return the file or folder outside docs/ that a link leads to, or None if it stays inside or leads nowhere."""
    target = Path(os.path.normpath(DOCS / Path(page).parent / link))
    is_outside = target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
    return target.relative_to(ROOT) if is_outside and target.exists() else None


def name_source_page(target: Path) -> str:
    """Return where on the site the page of a file or folder lies."""
    return f"source/{target.as_posix()}.md"


def format_source(target: Path) -> str:
    """Return the page of a file: its text; or of a package: its modules with the first lines of their docstrings."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# {target.as_posix()}\n\n"
    path = ROOT / target
    if path.is_dir():
        modules = sorted([*path.glob("*.py"), *path.glob("*/__init__.py")])
        lines = [f"* `{module.relative_to(path).as_posix()}`: {read_first_line(module)}" for module in modules]
        return head + "\n".join(lines) + "\n"
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````\n"


def convert_notebook(target: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook with its outputs, and its images by file name."""
    exporter = MarkdownExporter(preprocessors=[CoalesceStreamsPreprocessor])
    page, resources = exporter.from_filename(str(ROOT / target))
    return page, {name: image for name, image in resources["outputs"].items() if name in page}


def read_first_line(module: Path) -> str:
    """Return the first line of a module's docstring, or nothing."""
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n")[0]
