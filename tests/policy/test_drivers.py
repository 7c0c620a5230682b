"""Drivers: the rows of a batch, and what a rollout draws, records and keeps."""

import pytest
import torch
from half_steps import SEEDS, STD, HalfSteps, record, run

from diffusion_grpo.policy.drivers import Driver, FinishDriver, PrefixDriver, Recorder, StepScored, UnsupportedPipeline
from diffusion_grpo.policy.trajectory import RolloutRequest


def test_rows_are_copies_of_the_samples():
    driver = Driver(SEEDS)
    assert [driver.enter("video", index, torch.ones(rows, 3)) for index, rows in enumerate((2, 4))] == [1, 2]
    with pytest.raises(UnsupportedPipeline, match="steps 3 latents at once, but 2 samples were requested"):
        driver.enter("video", 2, torch.ones(3, 3))


def test_each_scheduler_is_handed_its_part_of_the_latents():
    whole = torch.arange(14.0).view(2, 7)
    driver = Driver(SEEDS)
    driver.latents = whole
    video, sound = (driver.hand_over(torch.zeros(*shape)) for shape in ((2, 2, 2), (4, 3)))
    assert torch.equal(video.flatten(1), whole[:, :4]) and torch.equal(sound, whole[:, 4:].repeat(2, 1))
    assert not driver.latents.numel()


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


def test_a_call_ends_once_all_is_recorded():
    with pytest.raises(StepScored):
        record(steps=[[0], [1]], is_complete=False)


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(UnsupportedPipeline, match="takes 4 steps, .*below 3, got .3."):
        record(steps=[[3], [3]])
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


def test_a_prediction_of_both_halves_of_guidance_is_not_shared():
    driver = PrefixDriver(1, SEEDS, "cpu")
    with pytest.raises(StepScored):
        run(driver, HalfSteps(), torch.ones(4, 3))
    assert driver.prefix.prediction is None
    request = RolloutRequest(SEEDS, SEEDS, 4, steps=[[1], [1]], noise_steps=[{1}] * 2, prefix=driver.prefix)
    recorder = Recorder(request, 0.7)
    recorder.step(HalfSteps(), 0, torch.zeros(2, 3), None, torch.ones(2, 3))
    assert recorder.needs_network
    run(recorder := Recorder(request, 0.7), HalfSteps(), torch.ones(2, 3))
    assert recorder.trajectory().shared_steps is None
