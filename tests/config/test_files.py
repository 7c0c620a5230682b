"""Paths and text files that users write."""

from pathlib import Path

import pytest

from diffusion_grpo.config.files import expand_home, read_text


def test_an_encoding_that_is_not_utf_8_is_named_with_its_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("a cat\na café\n".encode("cp1252"))
    with pytest.raises(ValueError, match="prompts.txt, line 2"):
        read_text(file)
    file.write_bytes("a café".encode("utf-8-sig"))
    assert read_text(file) == "a café"


def test_a_tilde_is_the_home_folder_wherever_a_path_stands():
    home = str(Path.home())
    assert expand_home({"a": ["~/x", "b~"], "n": 1}) == {"a": [f"{home}/x", "b~"], "n": 1}
