"""Networks that a run trains: how they are named, and what is refused."""

import pytest
from command_line import make_config
from diffusers import GlmImagePipeline, WanPipeline

from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.training.trained_networks import check_tokens, check_trained_networks, choose_networks

WAN = {"transformer": 0, "transformer_2": 0, "vae": 0}


class Refusing(DistributedBackend):
    """Notes what it is asked."""

    def check_run(self, component, **run):
        self.asked = component, run
        raise ValueError("not with these processes")


@pytest.mark.parametrize(
    ("components", "train_component", "names"),
    [
        (WAN, None, ("transformer", "transformer_2")),
        (WAN, "transformer_2", ("transformer_2",)),
        (WAN, "transformer, transformer_2", ("transformer", "transformer_2")),
        ({"transformer_2": 0, "vae": 0}, None, ("transformer_2",)),
        ({"unet": 0, "text_encoder": 0}, None, ("unet",)),
        ({"vae": 0}, None, ()),
    ],
)
def test_the_names_are_those_that_the_loaded_pipeline_would_have(components, train_component, names):
    assert choose_networks(components, train_component) == names


@pytest.mark.parametrize(
    ("pipeline", "networks", "settings", "expected"),
    [
        (WanPipeline, ("transformer", "transformer_2"), {"step_selection": "sample"}, {"own_steps": True}),
        (GlmImagePipeline, ("vision_language_encoder",), {}, {"draws_tokens": True}),
        (GlmImagePipeline, ("transformer",), {}, {}),
    ],
)
def test_the_processes_are_asked_about_them(pipeline, networks, settings, expected):
    backend = Refusing(None, ContextGroups())
    with pytest.raises(ValueError, match="not with these processes"):
        check_trained_networks(networks, pipeline, make_config(**settings), backend)
    run = {"processes": 1, "own_steps": False, "draws_tokens": False}
    assert backend.asked == (networks, run | expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_level": 0.7}, "noise_level=0.7 is for denoising steps"),
        ({"loss_type": "diffusion_grpo.losses.dppo"}, "dppo' compares means of denoising steps, which tokens lack"),
    ],
)
def test_settings_of_denoising_steps_are_refused_for_tokens(settings, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(make_config(**settings))
