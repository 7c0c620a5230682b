"""Drivers, with a scheduler whose steps are known: what is recorded, handed back and scored."""

import pytest
import torch

from diffusion_grpo.policy.drivers import (
    Finisher,
    Predictor,
    Recorder,
    StepScored,
    Teacher,
    UnsupportedPipeline,
)
from diffusion_grpo.policy.trajectory import StepScale

SEEDS = torch.tensor([3, 4])
STD = 0.5


class Steps:
    """A scheduler that halves its latents, and whose log-density is the negative mean squared distance."""

    def __init__(self, loop_length=4):
        self.loop_length = loop_length

    def deterministic(self, prediction, timestep, sample):
        return sample / 2

    def distribution(self, prediction, timestep, sample, noise_level):
        return sample.float() / 2, torch.tensor(STD)

    def drop_variance(self, prediction, sample):
        return sample if prediction is None else prediction

    def scale(self, timestep, sample, noise_level, count=None):
        return StepScale(torch.full((len(sample),), STD), torch.ones(len(sample)), torch.ones(len(sample)))

    def log_prob(self, next_latents, mean, std):
        return -((next_latents - mean) ** 2).flatten(1).mean(1)


def run(driver, scheduler, latents):
    """Pass a loop; return what each step left."""
    left = []
    for index in range(scheduler.loop_length):
        latents = driver.step(scheduler, index, latents, None, latents)
        left.append(latents)
    return left


def record(scheduler=None, latents=None, **settings):
    given = {"noise_steps": None, "trained_steps": None, "noise_level": 0.7, "device": "cpu"} | settings
    recorder = Recorder(SEEDS, SEEDS + 10, **given)
    left = run(recorder, scheduler or Steps(), torch.ones(2, 3) if latents is None else latents)
    return recorder, left


def trajectory_of(recorder):
    settings = {"seeds": SEEDS, "initial_seeds": SEEDS + 10, "num_inference_steps": 4, "noise_level": 0.7}
    return recorder.trajectory(**settings)


def test_a_recorder_draws_each_samples_noise_from_its_own_seed():
    recorder, left = record()
    noise = [torch.randn(3, generator=torch.Generator().manual_seed(int(seed))) for seed in SEEDS]
    torch.testing.assert_close(left[0], 0.5 + STD * torch.stack(noise))
    assert torch.equal(left[3], left[2] / 2)  # the last step has no noise
    trajectory = trajectory_of(recorder)
    assert trajectory.steps.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(trajectory.latents[:, 1], left[0]) and torch.equal(trajectory.next_latents[:, 1], left[1])
    expected = -((left[1] - left[0] / 2) ** 2).mean(1)
    torch.testing.assert_close(trajectory.log_probs[:, 1], expected)


def test_noise_and_records_where_they_are_asked_for():
    recorder, left = record(noise_steps={1, 3}, trained_steps=torch.tensor([[1], [1]]))
    assert torch.equal(left[0], torch.full((2, 3), 0.5)) and torch.equal(left[2], left[1] / 2)
    assert torch.equal(left[3], left[2] / 2) and trajectory_of(recorder).steps.tolist() == [[1], [1]]
    _, left = record(noise_steps={3}, trained_steps=torch.empty(2, 0, dtype=torch.int64), noise_in_last_step=True)
    assert not torch.equal(left[3], left[2] / 2)


def test_each_sample_may_train_steps_of_its_own():
    trajectory = trajectory_of(record(trained_steps=torch.tensor([[0, 2], [1, 2]]))[0])
    _, left = record()
    assert torch.equal(trajectory.next_latents[0, 0], left[0][0])
    assert torch.equal(trajectory.next_latents[1, 0], left[1][1])
    assert torch.equal(trajectory.next_latents[:, 1], left[2])


def test_a_call_ends_once_all_is_recorded():
    with pytest.raises(StepScored):
        record(trained_steps=torch.tensor([[0], [1]]), is_complete=False)


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(UnsupportedPipeline, match="takes 4 steps, .*below 3, got .3."):
        record(trained_steps=torch.tensor([[3], [3]]))
    recorder, _ = record()
    with pytest.raises(UnsupportedPipeline, match="runs its denoising loop several times"):
        run(recorder, Steps(), torch.ones(2, 3))
    with pytest.raises(UnsupportedPipeline, match="steps 3 latents at once where 2 samples were asked for"):
        record(latents=torch.ones(3, 3))
    with pytest.raises(UnsupportedPipeline, match="nothing can be recorded"):
        trajectory_of(Recorder(SEEDS, SEEDS, None, None, 0.7, "cpu"))


def test_both_halves_of_guidance_get_the_same_noise_and_one_is_recorded():
    recorder, left = record(latents=torch.ones(4, 3))
    assert torch.equal(left[0][:2], left[0][2:]) and trajectory_of(recorder).latents.shape == (2, 3, 3)


def test_a_teacher_hands_back_what_was_recorded_and_scores_the_step():
    recorder, left = record()
    trajectory = trajectory_of(recorder)
    teacher = Teacher(2, trajectory.latents[:, 2], trajectory.next_latents[:, 2], 0.7, SEEDS + 10)
    handed, scheduler = torch.full((2, 3), 9.0), Steps()
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
    video, audio = Steps(2), Steps(2)
    recorder = Recorder(SEEDS, SEEDS, None, None, 0.7, "cpu")
    first = (
        recorder.step(video, 0, None, None, torch.ones(2, 6)),
        recorder.step(audio, 0, None, None, torch.ones(2, 2)),
    )
    trajectory = trajectory_of(recorder)
    assert trajectory.latents.shape == (2, 1, 8)
    expected = -((torch.cat(first, 1) - 0.5) ** 2).mean(1)
    torch.testing.assert_close(trajectory.log_probs[:, 0], expected)
    teacher = Teacher(0, trajectory.latents[:, 0], trajectory.next_latents[:, 0], 0.7, SEEDS)
    teacher.step(video, 0, None, None, torch.ones(2, 6))
    with pytest.raises(StepScored):
        teacher.step(audio, 0, None, None, torch.ones(2, 2))
    torch.testing.assert_close(teacher.scored.log_prob, expected)
    with pytest.raises(UnsupportedPipeline, match="move 2 latents at once"):
        Finisher(recorder)


def test_a_finisher_ends_with_the_latents_of_the_rollout():
    recorder, left = record()
    finisher = Finisher(recorder)
    found = run(finisher, Steps(), torch.full((2, 3), 5.0))
    assert torch.equal(found[0], torch.full((2, 3), 5.0)) and torch.equal(found[-1], left[-1])


def test_a_predictor_keeps_the_prediction_at_a_given_latent():
    latents, scheduler = torch.arange(6.0).view(2, 3), Steps()
    predictor = Predictor(1, latents, SEEDS)
    handed = predictor.step(scheduler, 0, torch.zeros(2, 3), None, torch.zeros(2, 3))
    assert torch.equal(handed, latents)
    with pytest.raises(StepScored):
        predictor.step(scheduler, 1, handed + 1, None, handed)
    assert torch.equal(predictor.found.prediction, latents + 1) and torch.equal(predictor.found.sample, latents)
    with pytest.raises(ValueError, match="takes 4 steps, so there is no step 4"):
        Predictor(4, latents, SEEDS).step(scheduler, 0, latents, None, latents)
    with pytest.raises(ValueError, match="not the pipeline's initial latents"):
        Predictor(0, latents, SEEDS).step(scheduler, 0, latents, None, latents + 1)
