"""Tiny runs of everything that trains recorded steps, on each kind of scheduler, network and training."""

import math

import pytest
import torch
from tiny_runs import brightness, first_frame_brightness, joined_trajectory, logged, trained_weights, trainer_for

SHORT = {"gradient_accumulation_steps": 1, "num_inference_steps": 4}
# two updates per rollout: losses that compare with the policy that rolled out differ from grpo's only in the second
TWICE = {"num_iterations": 2, "max_steps": 3}

KINDS = {
    "DDIM": {"name": "sd15"},
    "EDM": {"name": "cosmos"},
    "video": {"name": "wan"},
    "two experts": {"name": "wan_experts", "num_inference_steps": 6},
    "full": {"lora": False, "beta": 0.1, "learning_rate": 1e-4},
}
EVERY_STEP = {
    "noise": {"step_weight": "noise"},
    "guard's weight": {"step_weight": "guard"},
    "dppo, velocity": {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-9}, "step_weight": "velocity"} | TWICE,
    "grpo_guard": {"loss_type": "grpo_guard"} | TWICE,
    "precise": {"sde_type": "precise"},
    "wan_sde": {"sde_type": "wan_sde"},
}
FLOW_ONLY = {(kind, name) for kind in ("DDIM", "EDM") for name in ("precise", "wan_sde")}
PAIRS = [(kind, name) for kind in KINDS for name in EVERY_STEP if (kind, name) not in FLOW_ONLY]
# each kind and each name at least twice
QUICK = {("DDIM", "guard's weight"), ("DDIM", "dppo, velocity"), ("EDM", "noise"), ("EDM", "grpo_guard")}
QUICK |= {("video", "wan_sde"), ("video", "dppo, velocity"), ("video", "guard's weight")}
QUICK |= {("two experts", "noise"), ("two experts", "precise"), ("full", "grpo_guard"), ("full", "wan_sde")}
QUICK |= {("full", "precise")}


def train(folder, name="sd3", callback=lambda trainer: None, **settings):
    """A trained run, after what holds for each: first ratios of exactly 1, and finite weights that have moved."""
    rewards = first_frame_brightness if name in ("cosmos", "wan", "wan_experts") else brightness
    trainer = trainer_for(folder, name, rewards=rewards, **SHORT | settings)
    callback(trainer)
    before = trained_weights(trainer)
    trainer.train()
    errors = logged(trainer, "ratio/max_error")
    assert errors == [0.0] * len(errors) and len(errors) == 2  # one for each rollout
    assert all(map(math.isfinite, logged(trainer, "loss") + logged(trainer, "grad_norm")))
    after = trained_weights(trainer)
    assert all(value.isfinite().all() for value in after.values())
    moved = {key for key, value in after.items() if not torch.equal(value, before[key])}
    if name == "wan_experts":
        assert {key.split(".")[0] for key in moved} == {"transformer", "transformer_2"}
    if "lora" in settings:
        assert len(moved) > 0.9 * len(after)  # not only some layer
        reference = trainer.learner.reference.weights.exact()
        assert all(torch.equal(*pair) for pair in zip(reference, before.values(), strict=True))
        assert logged(trainer, "kl")[0] == 0.0 < logged(trainer, "kl")[1]
    assert len(moved) > 0
    return trainer


def spread(values):
    """The largest by the smallest."""
    return max(values) / min(values)


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
)
def test_losses_weights_and_processes_on_every_kind(tmp_path, kind, name):
    """The gradient of a step is as large as its weight times |J| / std, whatever the loss, as long as ratios are 1."""
    settings, scales = KINDS[kind] | EVERY_STEP[name], {}

    def watch(trainer):
        real = trainer.policy.replay

        def replay(inputs, trajectory, step, *rest, **options):
            now = real(inputs, trajectory, step, *rest, **options)
            scales.setdefault(step, now.scale)
            return now

        trainer.policy.replay = replay

    trainer = train(tmp_path, callback=watch, **settings)
    steps = sorted(scales)
    std, jacobian = (torch.stack([getattr(scales[step], key)[0] for step in steps]) for key in ("std", "jacobian"))
    assert steps == list(range(len(steps))) and len(steps) >= 3
    sizes = torch.tensor([logged(trainer, f"grad_size/step_{step:02d}")[0] for step in steps])
    guard, found = std / jacobian, joined_trajectory(trainer).step_weights
    expected = {"noise": 2.25 * std, "guard": guard, "velocity": guard / guard.mean()}.get(settings.get("step_weight"))
    if expected is None:
        assert found is None
        weights = guard if name == "grpo_guard" else torch.ones(len(steps))
    else:
        torch.testing.assert_close(found, expected.expand_as(found))
        weights = expected
    relative = (sizes * guard / weights).tolist()
    assert spread(guard.tolist()) > 1.5 and spread(relative) < 1.1, relative  # the noises drawn are not as long
    if "num_iterations" in settings:
        distances, clipped = logged(trainer, "kl/old"), logged(trainer, "clip_ratio/region_mean")
        assert distances[0] == distances[2] == 0.0 < distances[1]
        assert clipped[0] == clipped[2] == 0.0 < clipped[1] or name != "dppo, velocity"
