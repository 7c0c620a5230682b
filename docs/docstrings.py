"""An extension of griffe: it reads docstrings as this project writes them.

References, [`name`] and [`~module.name`], become links where an API page documents the name, and plain code elsewhere.
Arguments that share a line, `height, width: pixels`, get one each.
"""

import re
from pathlib import Path

from griffe import Extension, Object

API = Path(__file__).parent / "api"
REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\](?!\(|\[)")
SHARED = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8,}.*)*)", flags=re.MULTILINE)


def find_documented() -> dict[str, str]:
    """Return the full path of everything that a page under docs/api names, by its last part."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
    return {path.rpartition(".")[2]: path for path in re.findall(r"^::: ([\w.]+)", text, flags=re.MULTILINE)}


def link(text: str, documented: dict[str, str]) -> str:
    """Replace the references in a docstring."""

    def replace(found: re.Match) -> str:
        name = found[2].rpartition(".")[2]
        shown = f"`{name if found[1] else found[2]}`"
        return f"[{shown}][{documented[name]}]" if name in documented else shown

    return REFERENCE.sub(replace, text)


def separate(text: str) -> str:
    """Give each of several arguments that share a line of a docstring its own."""
    return SHARED.sub(lambda found: "\n".join(f"    {name}: {found[2]}" for name in found[1].split(", ")), text)


class ReadDocstrings(Extension):
    """Rewrites each docstring once it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.documented = find_documented()

    def on_instance(self, *, obj: Object, **others: object) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = separate(link(obj.docstring.value, self.documented))
