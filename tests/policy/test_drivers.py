"""What all drivers share: the place in the loop, the rows of a batch, and latents that several schedulers move."""

import pytest
import torch

from diffusion_grpo.policy.drivers import Driver, UnsupportedPipeline

SEEDS = torch.tensor([3, 4])


def test_schedulers_take_each_step_once_and_together():
    driver, latents = Driver(SEEDS), torch.ones(2, 3)
    for index in range(2):
        for scheduler in ("video", "sound"):
            driver.enter(scheduler, index, latents)
            assert driver.current == index + 1
    with pytest.raises(UnsupportedPipeline, match="runs its denoising loop several times"):
        driver.enter("video", 1, latents)
    with pytest.raises(UnsupportedPipeline, match="runs its denoising loop several times"):
        driver.enter("text", 0, latents)


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
