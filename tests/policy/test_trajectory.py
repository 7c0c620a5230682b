"""What the stages exchange: rows that stay together, comparisons with a reference, and seeds."""

import torch

from diffusion_grpo.policy.trajectory import StepDistribution, StepScale, Trajectory, sample_seed


def make(count: int, tokens: bool = False) -> Trajectory:
    """Make a trajectory in which all that belongs to a sample shows its number."""
    numbers = torch.arange(count)
    latents = numbers.float()[:, None, None].expand(-1, 2, 3)
    ids = numbers[:, None].expand(-1, 4) if tokens else None
    steps = torch.tensor([[0, 2]]).expand(count, -1)
    return Trajectory(latents, latents + 0.5, latents[..., 0], steps, numbers, numbers + 10, 4, 0.7, ids)


def test_rows_are_chosen_and_joined_with_all_that_belongs_to_them():
    whole = make(4, tokens=True)
    chosen = whole[[3, 1]]
    assert len(chosen) == 2 and chosen.seeds.tolist() == [3, 1] and chosen.tokens[:, 0].tolist() == [3, 1]
    joined = Trajectory.cat([whole[:1], whole[1:]])
    assert joined.tensors().keys() == whole.tensors().keys() == make(1, tokens=True).tensors().keys()
    assert all(torch.equal(value, joined.tensors()[name]) for name, value in whole.tensors().items())
    assert joined.settings() == {"num_inference_steps": 4, "noise_level": 0.7}
    assert "tokens" not in make(1).tensors()
    assert make(2).to("meta").latents.device.type == "meta"


def test_a_step_is_compared_with_the_reference_where_there_is_one():
    scale = StepScale(torch.ones(1), torch.ones(1), moving=torch.full((1,), 2.0))  # of four elements, two move
    parts = torch.tensor(0.5), torch.zeros(1), scale, torch.zeros(1, 4)
    step, other = (StepDistribution(torch.full((1, 4), x), *parts, torch.full((1, 4), x)) for x in (1.0, 4.0))
    assert step.loss_inputs(None)["ref_mean"] is None and step.loss_inputs(other)["ref_mean"] is other.mean
    assert step.loss_inputs(None)["mean"] is step.mean and step.divergence(other.mean).tolist() == [36.0]
    assert step.compare(other)["velocity/ratio_to_ref"].tolist() == [0.25]
    other.velocity = step.scale = None
    assert step.divergence(other.mean).tolist() == [18.0]
    assert step.compare(other) == other.compare(step) == {}


def test_seeds_depend_on_all_parts_and_nothing_else():
    seeds = [sample_seed(*parts) for parts in ((1, "noise"), (1, "other"), (2, "noise"), ("1", "noise"), (1,))]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == sample_seed(1, "noise") == 4552272150904233932  # resumed runs go on with the same noise
