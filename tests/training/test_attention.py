"""Training uses no attention kernels of cuDNN, in rollouts and in updates, and leaves torch's choice as it was."""

import pytest
import torch
from tiny_runs import brightness, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.training.attention import avoid_cudnn_attention

is_enabled = torch.backends.cuda.cudnn_sdp_enabled


@pytest.fixture(params=[True, False])
def chosen(request):
    """What the user chose."""
    before = is_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_choice_comes_back_after_an_error_too(chosen):
    with avoid_cudnn_attention():
        assert not is_enabled()
    assert is_enabled() == chosen
    with pytest.raises(ValueError), avoid_cudnn_attention():
        raise ValueError
    assert is_enabled() == chosen


def test_a_run_rolls_out_and_updates_without_cudnn(tmp_path, chosen):
    seen = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(is_enabled())

    def watched_brightness(images, **columns):
        seen.append(is_enabled())
        return brightness(images)

    trainer = trainer_for(tmp_path, rewards=watched_brightness, callbacks=[Watch()], max_steps=1)
    trainer.policy.network.register_forward_pre_hook(lambda *args: seen.append(is_enabled()))
    trainer.train()
    assert len(seen) > 4 and not any(seen)
    assert is_enabled() == chosen


def test_cudnn_stays_in_use_where_it_was_chosen_for_the_network():
    with avoid_cudnn_attention(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert is_enabled()  # as diffusers' backend `_native_cudnn` does for each call
