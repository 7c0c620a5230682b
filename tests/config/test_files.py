"""Paths and text files that users write."""

import pytest

from diffusion_grpo.config.files import check_model_name, read_text


def test_an_encoding_that_is_not_utf_8_is_named_with_its_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("a cat\na café\n".encode("cp1252"))
    with pytest.raises(ValueError, match="prompts.txt, line 2"):
        read_text(file)
    file.write_bytes("a café".encode("utf-8-sig"))
    assert read_text(file) == "a café"


def test_names_of_models(tmp_path):
    for name in ("tiny", "owner/name"):
        check_model_name(name)
    for name in ("tyni", "./nothing", "a/b/c", str(tmp_path / "gone")):
        with pytest.raises(ValueError, match="there is no folder"):
            check_model_name(name)
    for index in (tmp_path, tmp_path / "model_index.json"):
        with pytest.raises(ValueError, match="not the folder of a diffusers pipeline"):
            check_model_name(str(index))
        (tmp_path / "model_index.json").write_text("{}")
    check_model_name(str(tmp_path))
