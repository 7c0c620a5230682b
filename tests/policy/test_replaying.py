"""Drivers of replays and predictions: what is handed back, scored and predicted."""

import pytest
import torch
from half_steps import SEEDS, STD, HalfSteps, record

from diffusion_grpo.policy.drivers import StepScored, UnsupportedPipeline
from diffusion_grpo.policy.recording import FinishDriver, Recorder
from diffusion_grpo.policy.replaying import PredictDriver, ReplayDriver
from diffusion_grpo.policy.trajectory import RolloutRequest


def test_a_teacher_hands_back_what_was_recorded_and_scores_the_step():
    recorder, left = record()
    trajectory = recorder.trajectory()
    teacher = ReplayDriver(2, trajectory.latents[:, 2], trajectory.next_latents[:, 2], 0.7, SEEDS + 10)
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
    teacher = ReplayDriver(0, trajectory.latents[:, 0], trajectory.next_latents[:, 0], 0.7, SEEDS)
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


def test_a_predictor_keeps_the_prediction_at_a_given_latent():
    latents, scheduler = torch.arange(6.0).view(2, 3), HalfSteps()
    predictor = PredictDriver(1, latents, SEEDS)
    handed = predictor.step(scheduler, 0, torch.zeros(2, 3), None, torch.zeros(2, 3))
    assert torch.equal(handed, latents)
    with pytest.raises(StepScored):
        predictor.step(scheduler, 1, handed + 1, None, handed)
    assert torch.equal(predictor.found.prediction, latents + 1) and torch.equal(predictor.found.sample, latents)
    with pytest.raises(ValueError, match="takes 4 steps, so there is no step 4"):
        PredictDriver(4, latents, SEEDS).step(scheduler, 0, latents, None, latents)
    with pytest.raises(ValueError, match="not the pipeline's initial latents"):
        PredictDriver(0, latents, SEEDS).step(scheduler, 0, latents, None, latents + 1)


def test_one_call_scores_all_samples_that_share_it():
    """As many rows as calls pass the network; each sample's next latent is scored by the row it shares."""
    latents, sources = torch.tensor([[2.0, 4.0], [6.0, 8.0]]), torch.tensor([1, 0, 0])
    next_latents = torch.arange(6.0).view(3, 2)
    teacher = ReplayDriver(1, latents, next_latents, 0.7, SEEDS, sources=sources)
    handed = teacher.step(HalfSteps(), 0, None, None, torch.zeros(2, 2))
    assert torch.equal(handed, latents)
    with pytest.raises(StepScored):
        teacher.step(HalfSteps(), 1, handed, None, handed)
    mean = (latents / 2)[sources]
    assert torch.equal(teacher.scored.mean, mean) and torch.equal(teacher.scored.prediction, latents[sources])
    assert torch.equal(teacher.scored.velocity, latents[sources])
    assert torch.equal(teacher.scored.log_prob, -((next_latents - mean) ** 2).mean(1))
    assert teacher.scored.scale.std.tolist() == [STD] * 3
