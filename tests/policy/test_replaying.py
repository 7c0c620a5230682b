"""Drivers of replays: what is handed back and scored."""

import pytest
import tiny_pipelines
import torch
from half_steps import SEEDS, STD, HalfSteps, record

from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.drivers import StepScored, UnsupportedPipeline
from diffusion_grpo.policy.recording import FinishDriver, Recorder
from diffusion_grpo.policy.replaying import ReplayDriver
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.trajectory import RolloutRequest, Trajectory


def test_a_teacher_hands_back_what_was_recorded_and_scores_the_step():
    recorder, left = record()
    trajectory = recorder.trajectory()
    teacher = ReplayDriver(2, trajectory)
    handed, scheduler = torch.full((2, 3), 9.0), HalfSteps()
    for index in range(2):
        assert not teacher.needs_network
        handed = teacher.step(scheduler, index, handed, None, handed)
    assert teacher.needs_network and torch.equal(handed, left[1])
    with pytest.raises(StepScored):
        teacher.step(scheduler, 2, handed, None, handed)
    assert torch.equal(teacher.scored.log_prob, trajectory.log_probs[:, 2])
    assert torch.equal(teacher.scored.mean, left[1] / 2) and teacher.scored.std == STD


def test_a_step_of_two_latents_is_scored_as_one():
    """As of video and audio, each with its own scheduler; the mean is over all dimensions together."""
    video, audio = HalfSteps(2), HalfSteps(2)
    recorder = Recorder(RolloutRequest(SEEDS, SEEDS, 4), 0.7)
    first = (
        recorder.step(video, 0, None, None, torch.ones(2, 6)),
        recorder.step(audio, 0, None, None, torch.ones(2, 2)),
    )
    trajectory = recorder.trajectory()
    assert trajectory.latents.shape == (2, 1, 8)
    expected = -((torch.cat(first, 1) - 0.5) ** 2).mean(1)
    torch.testing.assert_close(trajectory.log_probs[:, 0], expected)
    teacher = ReplayDriver(0, trajectory)
    handed = torch.ones(2, 2, 3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    teacher.step(video, 0, None, None, handed[0])
    with pytest.raises(StepScored):
        teacher.step(audio, 0, None, None, handed[1])
    now = teacher.scored
    torch.testing.assert_close(now.log_prob, expected)
    assert now.velocity.shape == now.mean.shape == (2, 8)
    found, *parts = torch.autograd.grad(now.log_prob.sum(), [now.mean, *handed])
    torch.testing.assert_close(found, (torch.cat(first, 1) - now.mean) / 4)  # all of it goes through the joined mean
    torch.testing.assert_close(torch.cat([part.flatten(1) for part in parts], 1), found / 2)
    with pytest.raises(UnsupportedPipeline, match="change 2 latents at once"):
        FinishDriver(recorder)


def test_one_call_scores_all_samples_that_share_it():
    """As many rows as calls pass the network; each sample's next latent is scored by the row it shares."""
    latents, sources = torch.tensor([[2.0, 4.0], [6.0, 8.0]]), torch.tensor([1, 0, 0])
    next_latents = torch.arange(6.0).view(3, 2)
    inputs, zeros, ones = latents[sources][:, None], torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.int64)
    trajectory = Trajectory(inputs, next_latents[:, None], zeros, ones, sources, SEEDS[sources], 4, 0.7)
    teacher = ReplayDriver(1, trajectory, sources)
    handed = teacher.step(HalfSteps(), 0, None, None, torch.zeros(2, 2))
    assert torch.equal(handed, latents)
    with pytest.raises(StepScored):
        teacher.step(HalfSteps(), 1, handed, None, handed)
    mean = (latents / 2)[sources]
    assert torch.equal(teacher.scored.mean, mean) and torch.equal(teacher.scored.prediction, latents[sources])
    assert torch.equal(teacher.scored.velocity, latents[sources])
    assert torch.equal(teacher.scored.log_prob, -((next_latents - mean) ** 2).mean(1))
    assert teacher.scored.scale.std.tolist() == [STD] * 3


@pytest.mark.parametrize("name", ["sd15", "wan", "cosmos"])
def test_the_prediction_is_what_the_scheduler_got_in_the_rollout(name, monkeypatch):
    pipe, inputs = tiny_pipelines.build(name)
    policy, seen = DenoisingPolicy(pipe), []
    distribution = type(policy.scheduler).distribution
    with monkeypatch.context() as patch:
        note = lambda self, prediction, *args: seen.append(prediction) or distribution(self, prediction, *args)  # noqa: E731
        patch.setattr(type(policy.scheduler), "distribution", note)
        _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=4)
    for step, prediction in enumerate(seen):
        assert torch.equal(replay(policy, inputs, trajectory, step).prediction, prediction)
