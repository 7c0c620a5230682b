"""Settings of a rollout do what they say: seen in the recorded steps, their noise, and the steps that draw none."""

import pytest
import torch
from tiny_runs import joined_trajectory, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.policy.rollout import replay
from diffusion_grpo.policy.stochastic_steps import FlowSteps


class KeepRollouts(TrainerCallback):
    """Keeps what each update was trained on: with one update per rollout, and a learning rate of 0."""

    def __init__(self):
        self.found = []
        self.trainer = None

    def on_step_end(self, *args, **kwargs):
        self.found.append((self.trainer.feed.buffer.rows, joined_trajectory(self.trainer)))


def rollouts(folder, count=1, **settings):
    """A trainer that learns nothing, and rows and trajectories of `count` rollouts of two groups of four."""
    keep = KeepRollouts()
    settings = {"learning_rate": 0.0, "weight_decay": 0.0, "max_steps": count} | settings
    trainer = keep.trainer = trainer_for(folder, callbacks=[keep], shuffle_dataset=False, **settings)
    trainer.train()
    return trainer, keep.found


def distinct(latents):
    """How many different ones there are."""
    return len(torch.unique(latents.flatten(1), dim=0))


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_initial_latents(tmp_path, is_shared):
    """Of each sample or of each group, and new ones in each rollout."""
    _, found = rollouts(tmp_path, 2, same_initial_noise=is_shared)
    starts = torch.stack([trajectory.latents[:, 0] for _, trajectory in found])  # (rollouts, samples, ...)
    groups = starts.view(4, 4, *starts.shape[2:])
    assert [distinct(group) for group in groups] == [1 if is_shared else 4] * 4
    assert distinct(starts.flatten(0, 1)) == (4 if is_shared else 16)
    after = torch.cat([trajectory.next_latents[:, 0] for _, trajectory in found])
    assert distinct(after) == 16


def test_every_noise_is_drawn_by_itself(tmp_path):
    """Initial latents, and the noise of each step, sample and rollout: no two are alike."""
    trainer, found = rollouts(tmp_path, 2)
    drawn = []
    for rows, trajectory in found:
        drawn.append(trajectory.latents[:, 0])
        for call in (slice(0, 4), slice(4, 8)):
            part, inputs = trajectory[call], trainer.inputs(rows[call])
            for column, step in enumerate((0, 1, 2)):
                with torch.no_grad():
                    now = replay(trainer.policy, inputs, part, step)
                drawn.append((part.next_latents[:, column] - now.mean) / now.std)
    noise = torch.cat([part.flatten(1) for part in drawn])
    assert len(noise) == 2 * 8 * 4  # a start and three steps each
    correlation = torch.corrcoef(noise).fill_diagonal_(0.0)
    assert correlation.abs().max() < 6 / noise.shape[1] ** 0.5 < 0.8
    assert noise.std().item() == pytest.approx(1.0, abs=0.05)


def test_a_share_of_the_steps(tmp_path):
    _, ((_, first),) = rollouts(tmp_path / "first", num_inference_steps=7, timestep_fraction=0.5)
    assert first.steps.tolist() == [[0, 1, 2]] * 8
    settings = {"num_inference_steps": 7, "timestep_fraction": 0.5, "permute_steps": True}
    _, ((_, own),) = rollouts(tmp_path / "own", **settings, max_ratio_error=None)
    rows = own.steps.tolist()
    assert all(row == sorted(set(row)) and len(row) == 3 and max(row) < 6 for row in rows)
    assert len({tuple(row) for row in rows}) > 1 and {step for row in rows for step in row} > {0, 1, 2}


@pytest.fixture
def silent(monkeypatch):
    """The steps that draw no noise, of each call of the pipeline in turn."""
    calls, real = [], FlowSteps.deterministic

    def noted(self, *args):
        if not calls or self.index in calls[-1] or (calls[-1] and self.index < max(calls[-1])):
            calls.append(set())
        calls[-1].add(self.index)
        return real(self, *args)

    monkeypatch.setattr(FlowSteps, "deterministic", noted)
    return calls


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {5}),
        ({"noise_in_last_step": True}, None),
        ({"sde_window": [1, 3]}, {5}),
        ({"sde_window": [1, 3], "deterministic_outside_window": True}, {0, 3, 4, 5}),
        ({"sde_window": [0, 2], "deterministic_outside_window": True}, {2, 3, 4, 5}),
    ],
    ids=str,
)
def test_the_steps_without_noise(tmp_path, silent, settings, expected):
    _, ((_, trajectory),) = rollouts(tmp_path, num_inference_steps=6, **settings)
    assert silent == ([] if expected is None else [expected] * 2)  # two calls of four samples
    start, stop = settings.get("sde_window", (0, 5))
    assert trajectory.steps.tolist() == [list(range(start, stop))] * 8


def test_a_window_moves_from_rollout_to_rollout(tmp_path, silent):
    settings = {"num_inference_steps": 6, "sde_window_size": 2, "deterministic_outside_window": True}
    _, found = rollouts(tmp_path, 4, **settings)
    windows = [trajectory.steps[0].tolist() for _, trajectory in found]
    assert len({tuple(window) for window in windows}) > 1
    assert silent == [set(range(6)) - set(window) for window in windows for _ in range(2)]
