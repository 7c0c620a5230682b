"""Training uses no attention kernels of cuDNN unless the user chose them, and leaves torch's choice as it was."""

import contextlib

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_runs import brightness, trainer_for
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainerCallback

from diffusion_grpo import check_pipeline, tiny
from diffusion_grpo.policy.networks import avoid_cudnn_attention

is_enabled = torch.backends.cuda.cudnn_sdp_enabled
CHOICES = {  # how the user chose kernels, and whether cuDNN's are used then
    "nothing": (contextlib.nullcontext, False),
    "cuDNN": (lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION), True),
    "cuDNN or math": (lambda: sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]), True),
    "flash": (lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), False),
}
RUNS_ON_CPU = ["nothing", "cuDNN or math", "flash"]  # a CPU has no kernels of cuDNN


def read_choice():
    """Return what torch may use."""
    cuda = torch.backends.cuda
    return is_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


@pytest.mark.parametrize("choice", CHOICES)
def test_only_the_default_is_changed_and_it_comes_back_after_an_error_too(choice):
    choose, expected = CHOICES[choice]
    with choose():
        before = read_choice()
        with avoid_cudnn_attention():
            assert is_enabled() == expected
            assert read_choice()[1:] == before[1:]
        assert read_choice() == before
        with pytest.raises(ValueError), avoid_cudnn_attention():
            raise ValueError
        assert read_choice() == before


def test_cudnn_stays_in_use_where_it_was_chosen_for_the_network():
    with avoid_cudnn_attention(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert is_enabled()  # as diffusers' backend `_native_cudnn` does for each call


@pytest.mark.parametrize("choice", RUNS_ON_CPU)
def test_rollouts_updates_and_evaluations(tmp_path, choice):
    choose, expected = CHOICES[choice]
    seen = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(is_enabled())

    def watched_brightness(images, **columns):
        seen.append(is_enabled())
        return brightness(images)

    trainer = trainer_for(tmp_path, rewards=watched_brightness, callbacks=[Watch()], max_steps=1)
    trainer.policy.network.register_forward_pre_hook(lambda *args: seen.append(is_enabled()))
    with choose():
        before = read_choice()
        trainer.train()
        assert len(seen) > 4 and set(seen) == {expected}
        seen.clear()
        trainer.evaluate(trainer.train_dataset)
        assert len(seen) > 1 and set(seen) == {expected}
        assert read_choice() == before


def test_the_check_of_a_pipeline_uses_what_training_uses():
    pipe = DiffusionPipeline.from_pretrained(tiny.PATH)
    seen = []
    pipe.transformer.register_forward_pre_hook(lambda *args: seen.append(is_enabled()))
    report = check_pipeline(pipe, {"prompt": ["a red circle"], "height": 32, "width": 32}, num_inference_steps=2)
    assert report.trains, report.reason
    assert len(seen) > 1 and not any(seen)
    assert is_enabled()
