"""Input that cannot be used is refused in one line."""

import pytest

from diffusion_grpo.cli.inputs import Refusal, call_or_refuse, load_checked
from diffusion_grpo.config.files import check_model_name


@pytest.mark.parametrize("error", [ValueError("too\n  large"), OSError("too large"), ImportError("too large")])
def test_errors_of_input_become_one_line(error):
    def fail():
        raise error

    with pytest.raises(Refusal, match="^too large$") as refusal:
        call_or_refuse(fail)
    assert refusal.value.__cause__ is error


def test_results_pass_and_bugs_keep_their_traceback():
    assert call_or_refuse(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_or_refuse(divmod, 7, 0)


def test_names_of_models(tmp_path):
    for name in ("tiny", "owner/name"):
        check_model_name(name)
    for name in ("tyni", "./nothing", "a/b/c", str(tmp_path / "gone")):
        with pytest.raises(ValueError, match="there is no folder"):
            check_model_name(name)
    with pytest.raises(ValueError, match="contains no model_index.json"):
        check_model_name(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="model_index.json is a file; give the folder"):
        check_model_name(str(tmp_path / "model_index.json"))
    check_model_name(str(tmp_path))


def test_prompts_are_checked_when_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "good.jsonl").write_text('{"prompt": "a cat"}\n')
    assert load_checked(str(tmp_path / "good.jsonl"), "train", "dataset")["prompt"] == ["a cat"]
    (tmp_path / "bad.jsonl").write_text('{"number": 3}\n')
    with pytest.raises(ValueError, match="eval_dataset.*prompt"):
        load_checked(str(tmp_path / "bad.jsonl"), "train", "eval_dataset")
