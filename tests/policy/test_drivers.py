"""What all drivers share: the place in the loop, and the rows of a batch."""

import pytest
import torch

from diffusion_grpo.policy.drivers import Driver, OneStepDriver, StepParts, UnsupportedPipeline, take_part

SEEDS = torch.tensor([3, 4])


def test_schedulers_take_each_step_once_and_together():
    driver = Driver(SEEDS, 2, 0.7)
    for index in range(2):
        for scheduler in ("video", "sound"):
            driver.enter(scheduler, index)
            assert driver.current == index + 1
    with pytest.raises(UnsupportedPipeline, match="runs its denoising loop several times"):
        driver.enter("video", 1)
    with pytest.raises(UnsupportedPipeline, match="runs its denoising loop several times"):
        driver.enter("text", 0)


def test_rows_are_copies_of_the_samples():
    driver = Driver(SEEDS, 2, 0.7)
    assert [driver.rows(torch.ones(count, 3)) for count in (2, 4)] == [1, 2]
    with pytest.raises(UnsupportedPipeline, match="steps 3 latents at once, but 2 samples were requested"):
        driver.rows(torch.ones(3, 3))


def test_a_follower_hands_each_scheduler_its_part_of_the_latents():
    whole = torch.arange(14.0).view(2, 7)
    follower = OneStepDriver(2, whole, SEEDS, None, 0.0)
    assert torch.equal(follower.hand_over(0, torch.zeros(2, 4)), torch.zeros(2, 4))  # an earlier step
    video, sound = (follower.hand_over(1, torch.zeros(2, *shape)) for shape in ((2, 2), (3,)))
    assert torch.equal(video.flatten(1), whole[:, :4]) and torch.equal(sound, whole[:, 4:])
    part, end = take_part(whole, 4, torch.zeros(4, 3), 2)
    assert torch.equal(part, whole[:, 4:]) and end == 7


def test_the_density_of_several_parts_is_their_mean_over_all_numbers():
    parts = StepParts()
    for count, score in ((6, [1.0, 2.0]), (2, [5.0, 10.0])):
        parts.add(torch.zeros(2, count), torch.zeros(2, count), torch.tensor(score))
    assert parts.log_prob().tolist() == [2.0, 4.0]
