"""The plan of a rollout: the order of its samples, which steps each trains, and what training does with them."""

import random
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import (
    assert_resumes,
    brightness,
    first_frame_brightness,
    joined_trajectory,
    logged,
    train_and_compare,
    trainer_for,
)
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.defaults import BatchSizes
from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.policy.rollout import replay
from diffusion_grpo.policy.stochastic_steps import FlowSteps
from diffusion_grpo.rollout.plan import RolloutOrder, SamplingPlan, choose_steps, gather_by_position, update_order

# The order: of any number of processes, the same samples share an update


def order_of(processes, generation, seed=0, process=0, **sizes):
    """The order of one rollout, a row per position; `accumulation` and `steps` are given for one process."""
    return RolloutOrder(sizes_of(processes, process, **sizes), seed, generation, range(64))


def sizes_of(processes, process=0, best_of_n=None, generations=4, batch=2, accumulation=4, steps=8, batches=1):
    return BatchSizes(
        num_generations=generations,
        best_of_n=best_of_n,
        micro_batch=batch,
        accumulation=accumulation // processes,
        steps_per_generation=steps // processes,
        num_iterations=1,
        data_processes=processes,
        data_process=process,
        num_batches=batches,
    )


def updates(order, positions):
    """The set of positions that each update trains on, all processes together."""
    processes = order.sizes.data_processes
    shares = [order.own(positions, process).view(order.updates, -1) for process in range(processes)]
    return [sorted(torch.cat([share[update] for share in shares]).tolist()) for update in range(order.updates)]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"generations": 16},  # larger than an update: micro-batches one by one
        {"generations": 8, "best_of_n": 2},
        {"steps": 4},
        {"generations": 6, "batch": 3, "accumulation": 4, "steps": 8},
        {"batches": 2},
    ],
    ids=["whole groups", "parts of groups", "best of n", "one update", "uneven", "batches"],
)
def test_updates_do_not_depend_on_the_number_of_processes(processes, case):
    for generation in range(3):
        one, many = (order_of(count, generation, **case) for count in (1, processes))
        assert torch.equal(one.made, many.made)
        assert sorted(many.by_process().tolist()) == list(range(len(one.made)))
        ranking = torch.randn(len(one.made), generator=torch.Generator().manual_seed(generation))
        trained = one.trained(ranking)
        assert torch.equal(trained, many.trained(ranking))
        assert updates(one, trained) == updates(many, trained)
        for process in range(processes):  # each trains on what it made
            assert set(many.own(trained, process).tolist()) <= set(many.own(many.made, process).tolist())


def test_rollouts_of_several_updates_are_mixed_by_seed_and_generation():
    orders = [order_of(1, generation, seed).made for seed, generation in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert torch.equal(orders[0], order_of(1, 0).made)
    whole = orders[0].view(-1, 4) // 4
    assert (whole == whole[:, :1]).all()  # groups stay whole where they fit
    assert torch.equal(order_of(1, 0, steps=4).made, torch.arange(8))  # one update: nothing to mix


@pytest.mark.parametrize("case", [{}, {"generations": 8}, {"generations": 8, "best_of_n": 4}, {"accumulation": 2}])
def test_each_update_takes_one_batch(case):
    """FastVideo's `rl_num_batches_per_step`, whose updates never mix batches."""
    mixed = set()
    for generation in range(4):
        order = order_of(1, generation, batches=2, **case)
        trained = order.trained(torch.zeros(len(order.made)))
        batches = [{position * 2 // len(order.made) for position in update} for update in updates(order, trained)]
        assert all(len(batch) == 1 for batch in batches) and len(batches) == order.updates >= 2
        mixed.add(tuple(order.made.tolist()))
    assert len(mixed) > 1 or order.updates == len(trained) // 8 == 2


def test_best_of_n_of_groups_that_straddle_updates_mixes_all_of_them():
    order = order_of(1, 0, best_of_n=4, generations=6, batch=2, accumulation=1, steps=4)
    ranking = torch.arange(12.0)
    kept = order.trained(ranking)
    assert sorted(kept.tolist()) == [0, 1, 4, 5, 6, 7, 10, 11]
    assert not torch.equal(kept, kept.sort().values)


def test_iterations_after_the_first_make_the_same_updates_in_another_order():
    later = {tuple(update_order(3, iteration, 6).tolist()) for iteration in range(1, 9)}
    assert len(later) > 4 and all(sorted(order) == list(range(6)) for order in later)


def test_best_of_n_needs_whole_groups_in_each_processs_share_of_an_update(monkeypatch):
    monkeypatch.setattr(DiffusionGRPOConfig, "world_size", 2)
    common = {"output_dir": "out", "use_cpu": True, "per_device_train_batch_size": 2, "num_generations": 8}
    args = DiffusionGRPOConfig(**common, gradient_accumulation_steps=2, steps_per_generation=4, best_of_n=4)
    sizes = args.batch_sizes
    assert (sizes.update_share, sizes.samples_per_update, sizes.consecutive_samples) == (4, 8, 8)
    with pytest.raises(ValueError, match="best_of_n=4"):
        DiffusionGRPOConfig(**common, gradient_accumulation_steps=1, steps_per_generation=4, best_of_n=4)


@pytest.mark.parametrize(("processes", "context"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_what_is_gathered_from_processes_lies_where_its_sample_does(processes, context):
    every = [order_of(processes, 0, process=process, steps=16) for process in range(processes)]
    own = [torch.stack([order.own() * 10, order.own() * 10 + 1], dim=1) for order in every]  # (samples, 2)
    # of a context-parallel group only the first process counts
    rows = torch.cat([values if copy == 0 else values - 1000 for values in own for copy in range(context)])
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda tensor: rows)
    for process, order in enumerate(every):
        backend = DistributedBackend(None, ContextGroups(context, processes * context, process * context))
        backend.bind(accelerator, torch.nn.Module(), [])
        found = gather_by_position(backend, own[process], order)
        assert torch.equal(found[:, 0], 10 * torch.arange(32)) and torch.equal(found[:, 1], found[:, 0] + 1)
        assert gather_by_position(backend, None, order) is None
    if processes > 1:
        assert not torch.equal(torch.cat([order.own() for order in every]), every[0].made)  # the order matters


# Noise and steps of recorded samples


class KeepRollouts(TrainerCallback):
    """Keeps what each update was trained on: with one update per rollout, and a learning rate of 0."""

    def __init__(self):
        self.found = []
        self.trainer = None

    def on_step_end(self, *args, **kwargs):
        self.found.append((self.trainer.loader.buffer.rows, joined_trajectory(self.trainer)))


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


def test_each_sample_draws_steps_of_its_own(tmp_path):
    settings = {"num_inference_steps": 7, "num_trained_steps": 3, "step_selection": "sample"}
    _, ((_, own),) = rollouts(tmp_path, **settings, max_ratio_error=None)
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
        ({"noisy_steps": "all_and_last"}, None),
        ({"trained_steps": [1, 3]}, {5}),
        ({"trained_steps": [1, 3], "noisy_steps": "trained"}, {0, 3, 4, 5}),
        ({"trained_steps": [0, 2], "noisy_steps": "trained"}, {2, 3, 4, 5}),
    ],
    ids=str,
)
def test_the_steps_without_noise(tmp_path, silent, settings, expected):
    _, ((_, trajectory),) = rollouts(tmp_path, num_inference_steps=6, **settings)
    assert silent == ([] if expected is None else [expected] * 2)  # two calls of four samples
    start, stop = settings.get("trained_steps", (0, 5))
    assert trajectory.steps.tolist() == [list(range(start, stop))] * 8


def test_by_default_one_early_step_is_noisy_and_trained_and_its_call_shared(tmp_path, silent):
    default = {"trained_steps": None, "samples_per_latent": None, "noisy_steps": "trained"}
    _, found = rollouts(tmp_path, 4, num_inference_steps=6, **default)
    drawn = [trajectory.steps.unique().tolist() for _, trajectory in found]
    assert all(len(steps) == 1 and steps[0] < 3 for steps in drawn) and len({steps[0] for steps in drawn}) > 1
    calls = [steps for steps in silent if 5 in steps]  # to the end; steps before the noise are taken once for a group
    trained = [step for (step,) in drawn for _ in range(2)]
    assert [max(set(range(6)) - steps) for steps in calls] == trained
    for (_, trajectory), steps in zip(found, drawn, strict=True):
        assert trajectory.shared_steps.tolist() == steps * 8
        assert [distinct(trajectory.latents[first : first + 4, 0]) for first in (0, 4)] == [1, 1]
        assert distinct(trajectory.next_latents[:, 0]) == 8
    assert len({*torch.cat([trajectory.initial_seeds for _, trajectory in found]).tolist()}) == 4 * 2


# Which steps a sample may train


def plan(**settings):
    """A plan of steps of which 2 to 7 may be trained, two at once, by groups of four."""
    one = {"updates_per_rollout": settings.pop("updates_per_rollout", 1)}
    settings = {"trainable_steps": range(2, 8), "is_noise_limited": True, "step_selection": "rollout"} | settings
    settings = {"latent_sharing": 1, "shares_calls": False, "step_interval": 25, "is_renoised": False} | settings
    recording = SimpleNamespace(shares_noise=False)
    common = {"seed": 0, "num_generations": 4, "trained_count": 2, "recording": recording}
    return SamplingPlan(SimpleNamespace(batch_sizes=SimpleNamespace(**one), **common, **settings))


def test_a_window_of_each_rollout_is_as_it_always_was():
    """The draws of runs that were started before there were other orders."""
    expected = [random.Random(f"window 0 {generation}").randint(2, 6) for generation in range(20)]
    assert [plan().draw_steps(generation, prompt=3).start for generation in range(20)] == expected


def test_each_prompt_draws_its_window_for_all_its_samples():
    drawn = plan(step_selection="prompt").draw(3, torch.arange(80))
    windows = [drawn.noise_steps[start : start + 4] for start in range(0, 80, 4)]
    assert all(len(set(group)) == 1 and len(group[0]) == 2 for group in windows)
    assert {group[0].start for group in windows} == {2, 3, 4, 5, 6}  # every place in 20 draws
    assert drawn.steps == [list(steps) for steps in drawn.noise_steps]
    part = plan(step_selection="prompt").draw(3, torch.arange(40, 60))  # another process's share
    assert part.steps == drawn.steps[40:60] and torch.equal(part.seeds, drawn.seeds[40:60])
    assert plan(step_selection="prompt").draw(4, torch.arange(80)).steps != drawn.steps


@pytest.mark.parametrize("updates_per_rollout", [1, 2, 5, 7])
def test_a_window_slides_from_the_start_to_the_end_and_again(updates_per_rollout):
    """By one every five updates: a rollout is trained in the place where its first update finds the window."""
    sliding = plan(step_selection="sliding", step_interval=5, updates_per_rollout=updates_per_rollout)
    starts = [place for place in (2, 3, 4, 5, 6) for _ in range(5)] * 4  # of each update
    for generation in range(len(starts) // updates_per_rollout):
        start = starts[generation * updates_per_rollout]
        assert sliding.draw_steps(generation) == range(start, start + 2)
        assert sliding.draw(generation, torch.arange(4, 8)).steps == [[start, start + 1]] * 4


def test_samples_of_one_latent_share_it_and_the_steps():
    drawn = plan(latent_sharing=2, shares_calls=True, step_selection="prompt").draw(0, torch.arange(16))
    assert drawn.initial_seeds[::2].equal(drawn.initial_seeds[1::2])
    assert len(drawn.initial_seeds.unique()) == 8 and len(drawn.seeds.unique()) == 16
    assert drawn.prefix_lengths == [steps.start for steps in drawn.noise_steps]
    assert plan().draw(0, torch.arange(16)).prefix_lengths is None
    noisy = plan(latent_sharing=2, shares_calls=True, is_noise_limited=False).draw(0, torch.arange(16))
    assert noisy.prefix_lengths == [0] * 16  # the first step draws noise: they share its prediction alone


@pytest.mark.parametrize(
    ("steps", "count"), [(range(1, 10), 6), (range(1, 7), 4), (range(1, 6), 3), (range(9), 1), (range(2, 8), 3)]
)
def test_strata_choose_each_step_equally_often(steps, count):
    """Also where the number of drawn steps does not divide that of all."""
    seeds, length = range(4000), len(steps)
    drawn = [choose_steps(steps, count, seed, is_stratified=True) for seed in seeds]
    for row in drawn:
        assert len(set(row)) == count
        for number, step in enumerate(row):
            assert number * length // count <= step - steps.start < (number + 1) * length / count
    share = torch.tensor([sum(step in row for row in drawn) for step in steps]) / len(seeds)
    assert (share - count / length).abs().max() < 4 * 0.5 / len(seeds) ** 0.5
    if length % count == 0 and count > 1:  # each part draws on its own
        assert len(set(map(tuple, drawn))) == (length // count) ** count


def test_steps_drawn_one_by_one_are_ascending_and_depend_on_the_seed():
    drawn = [choose_steps(range(2, 8), 3, seed) for seed in range(50)]
    assert all(row == sorted(set(row)) and len(row) == 3 for row in drawn)
    assert {step for row in drawn for step in row} == set(range(2, 8)) and len(set(map(tuple, drawn))) > 5
    assert drawn == [choose_steps(range(2, 8), 3, seed) for seed in range(50)]


# In training, orders of the steps


ORDERS = {
    "per_prompt": {"step_selection": "prompt"},
    "sliding": {"step_selection": "sliding", "step_interval": 1},
    "branches": {"samples_per_latent": 2},
    "branches, per_prompt": {"samples_per_latent": 4, "step_selection": "prompt"},
    "branches, sliding": {"samples_per_latent": 2, "step_selection": "sliding", "step_interval": 2},
}
QUICK = ("sliding", "branches, per_prompt")  # one of each kind
WINDOW = {"num_inference_steps": 6, "trained_steps": [1, 5], "num_trained_steps": 1, "noisy_steps": "trained"}


@pytest.mark.parametrize(
    ("name", "order"),
    [("sd3", order) for order in ORDERS if order not in QUICK]  # which the test of resuming trains
    + [(name, order) for name in ("sd15", "wan", "wan_experts") for order in ("per_prompt", "branches")]
    + [pytest.param("cosmos", order, marks=pytest.mark.slow) for order in ORDERS],
)
def test_the_ratio_is_exactly_one_in_every_order(tmp_path, name, order):
    """With flow matching, DDIM and EDM, images and videos; and the weights move."""
    rewards = first_frame_brightness if name in ("wan", "wan_experts", "cosmos") else brightness
    trainer = trainer_for(tmp_path, name, rewards=rewards, **WINDOW, **ORDERS[order])
    assert train_and_compare(trainer)
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]


def test_prompts_of_one_call_have_steps_of_their_own(tmp_path):
    """Two prompts in each call; replays of their steps are in smaller batches, so the ratio is 1 but for rounding."""
    settings = (
        WINDOW | ORDERS["branches, per_prompt"] | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    )
    trainer, found = rollouts(tmp_path, 4, **settings)
    plans = [SamplingPlan(trainer.args).draw(generation, torch.arange(8)) for generation in range(4)]
    assert [trajectory.steps.tolist() for _, trajectory in found] == [each.steps for each in plans]
    assert any(each.steps[0] != each.steps[4] for each in plans)
    assert max(logged(trainer, "ratio/max_error")) < 1e-5


@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=() if order in QUICK else pytest.mark.slow) for order in ORDERS]
)
def test_a_run_resumes_in_the_middle_of_an_order(tmp_path, order):
    """Bit for bit, from between two rollouts and from within one; two updates a rollout."""
    settings = WINDOW | ORDERS[order] | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"steps_per_generation": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    whole, *resumed = assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 2, 3)
    assert set(logged(whole, "ratio/max_error")) == {0.0}
    assert all(logged(again, "reward") == logged(whole, "reward") for again in resumed)
