"""An extension of griffe: references in docstrings, [`name`] and [`~module.name`], become links or plain code.

What the API pages document becomes a link; anything else stays a name.
"""

import re
from pathlib import Path

from griffe import Extension, Object

API = Path(__file__).parent / "api"
REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\](?!\(|\[)")


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


class LinkReferences(Extension):
    """Rewrites each docstring once it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.documented = find_documented()

    def on_instance(self, *, obj: Object, **others: object) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = link(obj.docstring.value, self.documented)
