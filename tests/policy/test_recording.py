"""Drivers of rollouts: what is drawn, recorded and kept."""

import pytest
import torch
from half_steps import SEEDS, STD, HalfSteps, record, run

from diffusion_grpo.policy.drivers import StepScored, UnsupportedPipeline
from diffusion_grpo.policy.recording import FinishDriver, PrefixDriver, Recorder
from diffusion_grpo.policy.trajectory import RolloutRequest


def test_a_recorder_draws_each_samples_noise_from_its_own_seed():
    recorder, left = record()
    noise = [torch.randn(3, generator=torch.Generator().manual_seed(int(seed))) for seed in SEEDS]
    torch.testing.assert_close(left[0], 0.5 + STD * torch.stack(noise))
    assert torch.equal(left[3], left[2] / 2)  # the last step has no noise
    trajectory = recorder.trajectory()
    assert trajectory.steps.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(trajectory.latents[:, 1], left[0]) and torch.equal(trajectory.next_latents[:, 1], left[1])
    expected = -((left[1] - left[0] / 2) ** 2).mean(1)
    torch.testing.assert_close(trajectory.log_probs[:, 1], expected)
    assert torch.equal(record(keeps_means=True)[0].trajectory().means[:, 1], left[0] / 2) and trajectory.means is None
    for latents in left:
        latents.zero_()  # as pipelines that write conditions into their latents
    again = recorder.trajectory()
    assert torch.equal(again.latents, trajectory.latents)
    assert torch.equal(again.next_latents, trajectory.next_latents)


def test_noise_and_records_where_they_are_asked_for():
    recorder, left = record(noise_steps=[{1, 3}] * 2, steps=[[1], [1]])
    assert torch.equal(left[0], torch.full((2, 3), 0.5)) and torch.equal(left[2], left[1] / 2)
    assert torch.equal(left[3], left[2] / 2) and recorder.trajectory().steps.tolist() == [[1], [1]]
    _, left = record(noise_steps=[{3}] * 2, steps=[[], []], noise_in_last_step=True)
    assert not torch.equal(left[3], left[2] / 2)


def test_each_sample_may_train_steps_of_its_own():
    trajectory = record(steps=[[0, 2], [1, 2]])[0].trajectory()
    _, left = record()
    assert torch.equal(trajectory.next_latents[0, 0], left[0][0])
    assert torch.equal(trajectory.next_latents[1, 0], left[1][1])
    assert torch.equal(trajectory.next_latents[:, 1], left[2])


def test_a_call_ends_once_all_is_recorded():
    with pytest.raises(StepScored):
        record(steps=[[0], [1]], is_complete=False)


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(UnsupportedPipeline, match="takes 4 steps, .*below 3, got .3."):
        record(steps=[[3], [3]])
    recorder, _ = record()
    with pytest.raises(UnsupportedPipeline, match="runs its denoising loop several times"):
        run(recorder, HalfSteps(), torch.ones(2, 3))
    with pytest.raises(UnsupportedPipeline, match="steps 3 latents at once, but 2 samples were requested"):
        record(latents=torch.ones(3, 3))
    with pytest.raises(UnsupportedPipeline, match="nothing can be recorded"):
        Recorder(RolloutRequest(SEEDS, SEEDS, 4), 0.7).trajectory()


def test_both_halves_of_guidance_get_the_same_noise_and_one_is_recorded():
    recorder, left = record(latents=torch.ones(4, 3))
    assert torch.equal(left[0][:2], left[0][2:]) and recorder.trajectory().latents.shape == (2, 3, 3)


def test_a_finisher_ends_with_the_latents_of_the_rollout():
    recorder, left = record()
    finisher = FinishDriver(recorder)
    found = run(finisher, HalfSteps(), torch.full((2, 3), 5.0))
    assert torch.equal(found[0], torch.full((2, 3), 5.0)) and torch.equal(found[-1], left[-1])


@pytest.mark.parametrize("length", [0, 2])
def test_branches_go_on_from_a_prefix_with_its_prediction(length):
    """Four samples of two latents; their first own step uses the prediction that the prefix's call made."""
    driver, latents = PrefixDriver(length, SEEDS + 10, "cpu"), torch.tensor([[4.0] * 3, [8.0] * 3])
    with pytest.raises(StepScored):
        run(driver, HalfSteps(5), latents)
    assert not driver.needs_network and driver.prefix.length == length
    assert torch.equal(driver.prefix.prediction, latents / 2**length)  # of this loop the sample is its prediction
    assert torch.equal(driver.prefix.latents, latents / 2**length)

    handed = []

    class Predicted(HalfSteps):
        def distribution(self, prediction, timestep, sample, noise_level):
            handed.append(prediction)
            return super().distribution(prediction, timestep, sample, noise_level)

    owners, seeds = [0, 0, 1, 1], torch.arange(4)
    noisy = set(range(length, 4))
    settings = {"steps": [[length]] * 4, "noise_steps": [noisy] * 4, "prefix": driver.prefix[owners]}
    recorder = Recorder(RolloutRequest(seeds, (SEEDS + 10)[owners], 5, **settings), 0.7)
    needed, scheduler, samples = [], Predicted(5), latents[owners]
    for index in range(5):
        needed.append(recorder.needs_network)
        samples = recorder.step(scheduler, index, torch.zeros(4, 3), None, samples)
    assert needed == [index > length for index in range(5)]
    assert torch.equal(handed[0], (latents / 2**length)[owners]) and not handed[1].any()
    trajectory = recorder.trajectory()
    assert trajectory.shared_steps.tolist() == [length] * 4
    assert torch.equal(trajectory.latents[:, 0], (latents / 2**length)[owners])


@pytest.mark.parametrize("reason", ["halves", "more"])
def test_a_prediction_that_does_not_say_everything_is_not_shared(reason):
    """Both halves of guidance, or what the pipeline hands to its scheduler beside the prediction."""
    scheduler = HalfSteps()
    scheduler.gets_more_of_network = reason == "more"
    driver = PrefixDriver(1, SEEDS, "cpu")
    with pytest.raises(StepScored):
        run(driver, scheduler, torch.ones(4 if reason == "halves" else 2, 3))
    assert driver.prefix.prediction is None
    request = RolloutRequest(SEEDS, SEEDS, 4, steps=[[1], [1]], noise_steps=[{1}] * 2, prefix=driver.prefix)
    recorder = Recorder(request, 0.7)
    recorder.step(scheduler, 0, torch.zeros(2, 3), None, torch.ones(2, 3))
    assert recorder.needs_network
    run(recorder := Recorder(request, 0.7), HalfSteps(), torch.ones(2, 3))
    assert recorder.trajectory().shared_steps is None
