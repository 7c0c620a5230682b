"""Input that cannot be used is refused in one line."""

import pytest

from diffusion_grpo import cli
from diffusion_grpo.cli.refusal import refusing
from diffusion_grpo.config.files import check_model_name


@pytest.mark.parametrize("error", [ValueError("too\n  large"), OSError("too large"), ImportError("too large")])
def test_errors_of_input_become_one_line(error, monkeypatch, capsys):
    def fail(arguments):
        with refusing():
            raise error

    monkeypatch.setattr("diffusion_grpo.cli.train.run", fail)
    assert cli.main(["train", "x.yaml"]) == 2
    assert capsys.readouterr().err == "error: too large\n"


def test_bugs_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), refusing():
        _ = 7 // 0


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
