"""A model, a checkpoint or a push that cannot work is refused first."""

import huggingface_hub
import pytest
from huggingface_hub import constants

from diffusion_grpo.config.early_checks import check_hub_access, check_resume_folder


def test_pushing_needs_a_token_and_the_hub(monkeypatch):
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set; unset it, or set push_to_hub=False"):
        check_hub_access("hf_mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    check_hub_access("hf_mine")
    with pytest.raises(ValueError, match="a token of the Hub, and none was found; run `hf auth login`"):
        check_hub_access(None)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_mine")
    check_hub_access(None)


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path):
    for wanted in (None, True, False, "true", "False", str(tmp_path)):
        check_resume_folder(wanted, tmp_path)
    with pytest.raises(ValueError, match="no folder nothere/checkpoint-5; give that of a checkpoint, or true"):
        check_resume_folder("nothere/checkpoint-5", tmp_path)
    with pytest.raises(ValueError, match="there is no folder 500"):
        check_resume_folder(500, tmp_path)
    (tmp_path / "tmp-checkpoint-20-old").mkdir()  # was being replaced when the run was killed
    check_resume_folder(tmp_path / "checkpoint-20", tmp_path)
    for number in (9, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
    with pytest.raises(ValueError, match="no folder nothere; the newest checkpoint in output_dir is .*-10[.]"):
        check_resume_folder("nothere", tmp_path)
