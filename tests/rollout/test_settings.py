"""Settings of a rollout do what they say: seen in the recorded steps, their noise, and the steps that draw none."""

import pytest
import tiny_pipelines
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny_runs import joined_trajectory, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.processes import log_density
from diffusion_grpo.policy.prompt_cache import PromptCache
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.schedulers import stochastic_scheduler
from diffusion_grpo.policy.stochastic_steps import FlowSteps

SEEDS = [1, 2]


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


def test_what_is_scored_is_the_latent_as_it_was_rounded():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.to(dtype=torch.bfloat16)
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    assert torch.equal(trajectory.next_latents, trajectory.next_latents.bfloat16().float())
    for column, step in enumerate((0, 1, 2)):
        with torch.no_grad():
            now = replay(policy, inputs, trajectory, step)
        scored = log_density(trajectory.next_latents[:, column], now.mean, now.std)
        torch.testing.assert_close(trajectory.log_probs[:, column], scored, rtol=0, atol=1e-6)


def test_a_negative_prompt_counts_in_the_replay():
    pipe, inputs = tiny_pipelines.build("sd3")
    inputs |= {"guidance_scale": 4.0, "negative_prompt": ["a grey blur", "text"]}
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    for column, step in enumerate((0, 1, 2)):
        with torch.no_grad():
            now, without = (
                replay(policy, given, trajectory, step) for given in (inputs, {**inputs, "negative_prompt": None})
            )
        assert torch.equal(now.log_prob, trajectory.log_probs[:, column])
        assert not torch.equal(without.log_prob, now.log_prob)


class Scaled:
    """An encoder whose embeddings depend on more than the prompt."""

    def encode_prompt(self, prompt, scale=1.0, layers=None, images=None):
        rows = torch.tensor([[float(len(text))] for text in prompt]) * scale * sum(layers or [1])
        return rows if images is None else rows + images.sum()


@pytest.mark.parametrize(
    "settings",
    [
        [{"scale": 1.0}, {"scale": 2.0}],
        [{"layers": (1, 2)}, {"layers": (1, 3)}],
        [{"scale": 2.0, "layers": (1,)}, {"scale": 1.0, "layers": (1,)}],
        [{"images": torch.ones(2)}, {"images": torch.zeros(2)}],
    ],
    ids=["scale", "layers", "both", "tensors"],
)
def test_a_prompt_that_was_encoded_under_other_settings_is_encoded_anew(settings):
    pipe, cache, prompts = Scaled(), PromptCache(), ["cat", "horse"]
    expected = [pipe.encode_prompt(prompts, **given) for given in settings]
    assert not torch.equal(*expected)
    with cache.serving(pipe):
        for given, embeddings in zip(settings * 2, expected * 2, strict=True):
            assert torch.equal(pipe.encode_prompt(prompts, **given), embeddings)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("process", ["flow_sde", "dance_sde", "cps"])
def test_mochis_time_runs_from_noise_to_data(process, index):
    """Its sigmas are 1 - s and its velocity is data - noise; in s and noise - data it is any other flow."""
    inverted = stochastic_scheduler(FlowMatchEulerDiscreteScheduler(invert_sigmas=True), process)
    inverted.set_timesteps(4)
    inverted.first, inverted.index = 0, index
    torch.manual_seed(index)
    clean, noise = torch.randn(2, 3, 4, dtype=torch.float64)
    s, after, second = (1 - inverted.sigmas.double())[[index, index + 1, 1]]
    x = (1 - s) * clean + s * noise
    mean, std = inverted.distribution((clean - noise).float(), inverted.timesteps[index], x.float(), 0.5)
    if process == "cps":
        expected_std = after * torch.sin(torch.tensor(torch.pi / 4))
        expected = (1 - after) * clean + (after**2 - expected_std**2).sqrt() * noise
    else:
        g = 0.5 * (torch.sqrt(s / (1 - (second if s == 1 else s))) if process == "flow_sde" else torch.ones(()))
        score = -(x - (1 - s) * clean) / s**2
        expected = x + (after - s) * (noise - clean - g**2 / 2 * score)
        expected_std = g * torch.sqrt(s - after)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(std.double(), expected_std.double(), rtol=1e-5, atol=1e-6)
    # and the step without noise goes the same way: towards the data
    euler = inverted.deterministic((clean - noise).float(), inverted.timesteps[index], x.float())
    torch.testing.assert_close(euler.double(), (1 - after) * clean + after * noise, rtol=1e-5, atol=1e-5)
