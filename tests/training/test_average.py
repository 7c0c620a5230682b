"""The moving average and the synchronised reference: when they move, and where they are used."""

import logging

import numpy as np
import pytest
import tiny_pipelines
import torch
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import (
    LORA,
    are_equal,
    finished_run,
    first_frame_brightness,
    logged,
    policy_weights,
    trained_weights,
    trainer_for,
)
from transformers import TrainerCallback

from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.policy.trajectory import sample_seed
from diffusion_grpo.training.average import find_policy_folder
from diffusion_grpo.weights import files as hub

AVERAGED = {"ema_decay": 0.5, "ema_update_interval": 1, "learning_rate": 0.05}


class Weights(TrainerCallback):
    """The policy's weights when training begins and after each update."""

    def __init__(self):
        self.trainer, self.seen = None, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(trained_weights(self.trainer))

    on_step_end = on_train_begin


def watched(folder, **settings):
    weights = Weights()
    weights.trainer = trainer_for(folder, callbacks=[weights], **settings)
    return weights.trainer, weights.seen


def test_the_average_moves_every_n_updates_and_warms_up_by_updates(tmp_path):
    """As Flow-GRPO's: (1 + n) / (10 + n) is kept at update n, up to the decay. It also moves after the last."""
    trainer, seen = watched(tmp_path, **AVERAGED | {"ema_decay": 0.3, "ema_update_interval": 2}, max_steps=5)
    trainer.train()
    average, distances = {name: value.double() for name, value in seen[0].items()}, []
    for update, kept in ((2, 3 / 12), (4, 0.3), (5, 0.3)):
        for name, value in seen[update].items():
            average[name] = kept * average[name] + (1 - kept) * value.double()
        moved = sum((average[name] - value).square().sum() for name, value in seen[update].items())
        distances.append((moved / sum(value.square().sum() for value in average.values())).sqrt().item())
    assert logged(trainer, "ema/distance") == pytest.approx(distances, rel=1e-4) and distances[-1] > 0
    for name, value in trained_weights(trainer).items():
        torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-7)
        assert not torch.allclose(value, seen[5][name], rtol=1e-3, atol=1e-5)


def test_evaluations_and_validation_prompts_are_drawn_with_the_average(tmp_path):
    """The published weights in a plain pipeline draw what was evaluated; the policy's own draw something else."""
    often = {"eval_strategy": "steps", "eval_steps": 3, "validation_steps": 3, "validation_prompts": ["a ship"]}
    trainer = finished_run(tmp_path, **AVERAGED, **often, max_steps=3)
    trainer.save_model()
    for folder, prompt in (("evaluations", "held out"), ("validation", "a ship")):
        written = np.asarray(Image.open(tmp_path / folder / "step-000003" / "0000.png"))
        drawn = []
        for place in (tmp_path, tmp_path / "policy"):
            pipe, inputs = tiny_pipelines.build("sd3")
            hub.load_weights(pipe, place)
            settings = {"seeds": [sample_seed(42, "evaluation", 0)], "num_inference_steps": 4, "noise_level": 0.0}
            images, _ = rollout(pipe, inputs | {"prompt": [prompt]}, **settings)
            drawn.append(np.asarray(images[0]))
        assert np.array_equal(written, drawn[0]) and not np.array_equal(written, drawn[1])


def test_a_second_run_goes_on_from_the_policy(tmp_path):
    trainer, seen = watched(tmp_path, **AVERAGED, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    policy, average = policy_weights(trainer), trained_weights(trainer)
    assert are_equal(seen[2], policy)
    assert not are_equal(average, policy)
    trainer.train(resume_from_checkpoint=True)
    assert are_equal(seen[3], policy)
    assert are_equal(trained_weights(trainer), average)
    hub.copy_weights(tmp_path / "checkpoint-2", tmp_path / "samples", ("transformer",))
    assert (tmp_path / "samples" / "policy" / hub.ADAPTER_WEIGHTS).is_file()


def test_where_a_checkpoint_keeps_the_policy(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert find_policy_folder(tmp_path, has_average=False) == tmp_path and not caplog.text
        assert find_policy_folder(tmp_path, has_average=True) == tmp_path
    assert "contains no moving average: it starts again" in caplog.text
    (tmp_path / "policy").mkdir()
    assert find_policy_folder(tmp_path, has_average=False) == tmp_path / "policy"


def test_a_reference_of_two_experts_with_dora_becomes_the_policy_and_is_not_saved(tmp_path):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "beta": 0.1}
    settings |= {"num_inference_steps": 6, "peft_config": LoraConfig(**LORA, use_dora=True)}
    trainer = trainer_for(tmp_path, "wan_experts", rewards=first_frame_brightness, max_steps=1, **settings)
    trainer.train()
    reference, policy = trainer.learner.reference.weights.parameters, trained_weights(trainer)
    assert len({name.split(".")[0] for name in policy}) == 2 and any("magnitude" in name for name in policy)
    assert all(torch.equal(kept, value) for kept, value in zip(reference, policy.values(), strict=True))
    trainer.pipe.save_pretrained(tmp_path / "merged")
    trainer.save_model(tmp_path / "lora")
    names = [name for path in tmp_path.rglob("*.safetensors") for name in load_file(path)]
    assert len(names) > len(policy) and not any("reference" in name for name in names)


@pytest.mark.parametrize("lora", [False, True])
def test_a_synchronised_reference_moves_towards_the_policy_every_n_updates(tmp_path, lora):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.75, "beta": 0.1}
    trainer, seen = watched(tmp_path, lora=lora, max_steps=3, **settings)
    trainer.train()
    reference = dict(zip(seen[0], trainer.learner.reference.weights.parameters, strict=True))
    for name, start in seen[0].items():
        torch.testing.assert_close(reference[name], torch.lerp(start, seen[2][name], 0.75), rtol=0, atol=1e-7)
    assert not all(torch.allclose(value, reference[name], atol=1e-5) for name, value in seen[3].items())
