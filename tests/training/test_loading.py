"""From a checked run to its policy."""

from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tiny_runs import LORA, PROMPTS, SETTINGS, brightness, trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.distributed.failure import ProcessGroupMonitor
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.token import TokenPolicy
from diffusion_grpo.training.loading import load_policy
from diffusion_grpo.training.preflight import check_run


def load(folder, seed=0):
    pipe, inputs = tiny_pipelines.build("sd3")
    kwargs = {name: value for name, value in inputs.items() if name != "prompt"}
    args = DiffusionGRPOConfig(str(folder), seed=seed, pipeline_kwargs=kwargs, **SETTINGS)
    peft_config = LoraConfig(**LORA)
    given = check_run(pipe, brightness, None, args, Dataset.from_dict({"prompt": PROMPTS}), None, peft_config)
    torch.rand(len(str(folder)))  # the global generator is somewhere else each time
    return pipe, load_policy(given, peft_config, ProcessGroupMonitor(given.args.distributed_state, ()))


def test_a_lora_around_the_network_is_all_that_is_trained_and_starts_from_the_seed(tmp_path):
    pipe, loaded = load(tmp_path / "one")
    assert loaded.policy.pipe is pipe and loaded.policy.component == ("transformer",) and loaded.embeds is None
    assert isinstance(loaded.model, PeftModel) and loaded.policy.networks == [pipe.transformer]
    assert "prompt" in loaded.inputs.accepted
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    trained = {name: p for part in [*parts, loaded.model] for name, p in part.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)

    def drawn(seed, name):
        _, loaded = load(tmp_path / name, seed)
        return torch.cat([p.flatten() for name, p in loaded.model.named_parameters() if "lora_A" in name])

    first = torch.cat([p.flatten() for name, p in loaded.model.named_parameters() if "lora_A" in name])
    assert torch.equal(drawn(0, "longer"), first) and not torch.equal(drawn(1, "other"), first)


def test_rewards_that_take_latents_are_refused_where_there_are_none():
    tokens = TokenPolicy.__new__(TokenPolicy)
    tokens.pipe = SimpleNamespace()
    with pytest.raises(UnsupportedPipeline, match="A reward takes latents, but SimpleNamespace gives none"):
        tokens.check_latents()


def test_more_noise_than_the_default_process_has_is_refused(tmp_path):
    """`sde_type: auto` is `ddim` for sd15, which takes the step's noise from that of its latent."""
    trainer_for(tmp_path, "sd3", noise_level=1.4)
    with pytest.raises(ValueError, match="noise_level must lie in .0, 1."):
        trainer_for(tmp_path, "sd15", noise_level=1.4)
