"""Paths and text files that users write."""

import pytest

from diffusion_grpo.config.files import read_text


def test_an_encoding_that_is_not_utf_8_is_named_with_its_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("a cat\na café\n".encode("cp1252"))
    with pytest.raises(ValueError, match="prompts.txt, line 2"):
        read_text(file)
    file.write_bytes("a café".encode("utf-8-sig"))
    assert read_text(file) == "a café"
