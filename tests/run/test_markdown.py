"""Text that others chose stands for itself in Markdown."""

import pytest

from diffusion_grpo.run.markdown import code, escape


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b <i>", "a\\|b \\<i\\>"),
        ("# no title", "\\# no title"),
        ("snake_case stays, _this_ does not", "snake_case stays, \\_this\\_ does not"),
        ("two\nlines\tand\x00more", "two lines and more"),
        ("[a](b) `c` $d$ &amp; !", "\\[a\\](b) \\`c\\` \\$d\\$ \\&amp; \\!"),
    ],
)
def test_special_characters_are_escaped(text, expected):
    assert escape(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b", "`a b`"), ("a`b", "``a`b``"), ("`a``", "``` `a`` ```"), ("", "`  `"), ("a\nb", "`a b`")],
)
def test_a_span_of_code_has_more_backquotes_than_its_text(text, expected):
    assert code(text) == expected
