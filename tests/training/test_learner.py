"""What a run trains, and which weights stand beside it."""

import pytest
import torch
from tiny_runs import SMOOTH_VIDEOS, are_equal, trained_weights, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.rollout.reference import AdapterReference, CopiedReference


@pytest.mark.parametrize(
    ("settings", "reference", "found"),
    [
        ({}, AdapterReference, set()),
        ({"lora": False}, None, set()),
        ({"lora": False, "beta": 0.1, "ema_decay": 0.9}, CopiedReference, {"average"}),
        ({"loss_type": "nft"}, AdapterReference, {"old_policy"}),
        ({"loss_type": "nft", "loss_kwargs": {"decay_max": 0.0}}, AdapterReference, set()),
        ({"advantage_estimator": "gae", "offload_frozen": "cpu"}, AdapterReference, {"values", "offload"}),
    ],
    ids=["LoRA", "full", "full, average", "old policy", "no decay", "value model, offload"],  # a set has no order
)
def test_the_settings_say_what_stands_beside_the_policy(tmp_path, settings, reference, found):
    trainer = trainer_for(tmp_path, **settings)
    learner = trainer.learner
    assert type(learner.reference) is (reference or type(None))
    assert isinstance(trainer.ref_model, torch.nn.Module) == (reference is CopiedReference)
    assert trainer.ref_model is not trainer.model
    optional = {name for name in ("average", "old_policy", "values", "offload") if getattr(learner, name) is not None}
    assert optional == found


def test_equal_rewards_move_neither_of_two_experts(tmp_path):
    """With its momentum, Adam would move both although their gradients are 0."""
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append({name: value.clone() for name, value in trained_weights(trainer).items()})

    columns = {"weight": [1.0, 1.0, 0.0, 0.0]}  # two prompts per update
    settings = SMOOTH_VIDEOS | {"num_inference_steps": 6, "columns": columns, "shuffle_dataset": False}
    trainer = trainer_for(tmp_path, "wan_experts", **settings, callbacks=[Watch()])
    seen.append({name: value.clone() for name, value in trained_weights(trainer).items()})
    trainer.train()
    before, first, second = seen
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], first[name])}
    assert moved == {"transformer", "transformer_2"}
    assert are_equal(first, second)
