"""What the rewards of a rollout come to, against references in float64 written out here."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import logged, trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms.advantages import estimate_advantages
from diffusion_grpo.rollout.estimator import AdvantageEstimator, measure_values
from diffusion_grpo.rollout.value_model import STATE_SIZE, ValueModel, ValueTargets

GROUPS = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}  # 4 prompts


def settings(**changed) -> DiffusionGRPOConfig:
    return DiffusionGRPOConfig("out", use_cpu=True, **{"advantage_clip": None, **GROUPS, **changed})


def found(args, rewards, positions=None, weights=(1.0,), model=None, **given):
    """Return the estimate, with this process's advantages, for rewards given as one list per function."""
    rewards = torch.tensor(rewards, dtype=torch.float32).T
    positions = torch.arange(len(rewards)) if positions is None else positions
    estimator = AdvantageEstimator(args, ["vq", "mq"][: len(weights)], list(weights), model)
    estimate = estimator(rewards, positions, **given)
    own = estimate.advantages[positions]
    return SimpleNamespace(**vars(estimate) | {"advantages": own.values, "targets": own.targets})


def random_rewards(functions: int = 1) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([1.0, 5.0, 0.2, 30.0]).repeat_interleave(4)  # a group each
    return (torch.randn(functions, 16, generator=generator) * spread).tolist()


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches", [1, 2, 4])
@pytest.mark.parametrize("scale_rewards", ["group", "batch"])
def test_statistics_of_the_batch_are_of_each_batch_by_itself(batches, scale_rewards):
    rewards = random_rewards()
    estimated = found(settings(num_batches_per_step=batches, scale_rewards=scale_rewards), rewards)
    expected = []
    for batch in torch.tensor(rewards[0], dtype=torch.float64).chunk(batches):
        for group in batch.split(4):
            std = group.std() if scale_rewards == "group" else batch.std()
            expected.append((group - group.mean()) / (std + 1e-8))
    assert_close(estimated.advantages, torch.cat(expected))


@pytest.mark.parametrize("generations", [1, 4])
def test_the_baseline_of_the_batch(generations):
    """Flow-GRPO without statistics by prompt: all samples of a batch are compared with each other."""
    args = settings(reward_baseline="batch", num_batches_per_step=2, num_generations=generations)
    estimated = found(args, random_rewards())
    halves = torch.tensor(random_rewards()[0], dtype=torch.float64).chunk(2)
    assert_close(estimated.advantages, torch.cat([(half - half.mean()) / (half.std() + 1e-8) for half in halves]))
    assert estimated.result.frac_reward_zero_std == 0
    assert_close(estimated.result.group_std, torch.cat([half.std().expand(8) for half in halves]))


def test_the_divergence_counts_once_in_a_sum_and_for_each_reward_normalised_by_itself():
    rewards, divergences = random_rewards(2), torch.rand(16, 3, generator=torch.Generator().manual_seed(1))
    penalty = 2.0 * divergences.mean(1)
    for order in ("sum_then_normalize", "normalize_then_sum", "loss_per_reward"):
        args = settings(kl_reward=2.0, multi_objective_aggregation=order)
        estimated = found(args, rewards, weights=(0.5, 3.0), divergences=divergences)
        table = torch.tensor(rewards, dtype=torch.float64)
        scored = (table * torch.tensor([0.5, 3.0])[:, None]).sum(0)
        assert estimated.columns["reward"] == pytest.approx(scored.tolist())  # what is logged is without the penalty
        if order == "sum_then_normalize":
            assert_close(estimated.advantages, found(settings(), [(scored - penalty).tolist()]).advantages)
        else:
            plain = settings(multi_objective_aggregation=order)
            assert_close(estimated.advantages, found(plain, (table - penalty).tolist(), weights=(0.5, 3.0)).advantages)


def test_each_reward_has_its_own_advantage_and_best_of_n_goes_by_their_weighted_sum():
    rewards = random_rewards(2)
    args = settings(multi_objective_aggregation="loss_per_reward", advantage_clip=1.0)
    estimated = found(args, rewards, weights=(0.7, -0.2))
    alone = [found(settings(), [column]).advantages for column in rewards]
    assert_close(estimated.advantages, torch.stack(alone, 1).clamp(-1, 1))
    assert_close(estimated.result.advantages, 0.7 * alone[0] - 0.2 * alone[1])  # before the clip, as DanceGRPO ranks
    assert estimated.result.advantages.abs().max() > 0.9
    share = (estimated.advantages.abs() == 1).double().mean().item()
    assert estimated.metrics["frac_advantage_clipped"] == share and 0 < share < 1
    assert estimated.columns["advantage/mq"] == pytest.approx(estimated.advantages[:, 1].tolist())
    assert estimated.columns["advantage"] == pytest.approx(estimated.result.advantages.tolist())


# an advantage function of the user's own


def ranks(rewards, groups, *, weights, batches):
    """Ranks of the weighted rewards within their group, from -1/2 to 1/2."""
    total = (rewards * weights).nansum(1)
    better = (total[:, None] > total) & (groups[:, None] == groups)
    return better.sum(1) / (groups[:, None] == groups).sum(1).sub(1) - 0.5


HERE = __name__


def test_an_advantage_function_takes_the_place_of_the_normalisation():
    """Two functions, one of which leaves samples out; a sample that both left out has the advantage 0."""
    rewards = random_rewards(2)
    rewards[0][3] = rewards[1][9] = rewards[0][9] = math.nan
    estimated = found(settings(advantage_fn=f"{HERE}.ranks"), rewards, weights=(1.0, -0.5))
    table = torch.tensor(rewards, dtype=torch.float32).double().T
    total = (table.nan_to_num() * torch.tensor([1.0, -0.5], dtype=torch.float64)).sum(1).view(4, 4)
    expected = (total.argsort(1).argsort(1) / 3 - 0.5).flatten().double()
    expected[9] = 0.0
    assert_close(estimated.advantages, expected)
    assert estimated.result.rewards[9].isnan() and estimated.columns["advantage"] == estimated.advantages.tolist()
    assert estimated.metrics["spread/advantage_max"] == 0.5


def told(rewards, groups, *, weights, batches):
    """Note what it is given; the first reward is the advantage."""
    told.given = rewards, groups, weights, batches
    return rewards[:, 0]


def test_what_an_advantage_function_is_given():
    """With kl_reward the rewards have the penalty taken off; clip and threshold follow what it returns."""
    rewards = random_rewards(2)
    divergences = torch.rand(16, 3, generator=torch.Generator().manual_seed(1))
    own = {"advantage_fn": f"{HERE}.told", "kl_reward": 0.5, "num_batches_per_step": 2}
    estimated = found(settings(**own), rewards, weights=(2.0, 3.0), divergences=divergences)
    given, groups, weights, batches = told.given
    penalised = torch.tensor(rewards).double().T - 0.5 * divergences.double().mean(1)[:, None]
    assert given.dtype == torch.float64 and weights.tolist() == [2.0, 3.0]
    assert_close(given, penalised)
    assert groups.tolist() == [place // 4 for place in range(16)] and batches.tolist() == [0] * 8 + [1] * 8
    assert_close(estimated.advantages, penalised[:, 0])
    mean = torch.tensor(rewards).T[:, :1].sum(1).view(4, 4).mean(1)
    clipped = found(settings(advantage_fn=f"{HERE}.told", advantage_clip=0.3), rewards[:1])
    assert_close(clipped.advantages, torch.tensor(rewards[0]).clamp(-0.3, 0.3))
    assert clipped.metrics["frac_advantage_clipped"] > 0.5
    dropped = found(settings(advantage_fn=f"{HERE}.told", reward_threshold=mean.min().item() + 1e-6), rewards[:1])
    assert dropped.advantages.view(4, 4).eq(0).all(1).tolist() == mean.eq(mean.min()).tolist()


def test_groups_of_one_sample_are_no_groups_of_equal_rewards():
    """What is logged of them is of each batch: its rewards differ, and the function learns from them."""
    rewards = random_rewards()
    args = settings(advantage_fn=f"{HERE}.told", num_generations=1, num_batches_per_step=2)
    estimated = found(args, rewards)
    assert_close(estimated.advantages, torch.tensor(rewards[0]))
    metrics = estimated.metrics
    halves = torch.tensor(rewards[0], dtype=torch.float64).chunk(2)
    assert metrics["reward_std"] == pytest.approx(sum(half.std().item() for half in halves) / 2, rel=1e-6)
    assert metrics["frac_reward_zero_std"] == 0 and metrics["frac_advantage_zero"] == 0
    assert found(args, [[1.0] * 8 + rewards[0][8:]]).metrics["frac_reward_zero_std"] == 0.5


def test_the_best_are_chosen_by_the_function_and_trained_with_its_advantages(tmp_path):
    trainer = trainer_for(tmp_path, advantage_fn=f"{HERE}.ranks", best_of_n=2, per_device_train_batch_size=2)
    trainer.train()
    assert sorted(trainer.loader.buffer.advantages.values.tolist()) == [-0.5, -0.5, 0.5, 0.5]
    assert max(logged(trainer, "ratio/max_error")) < 1e-5 and len(logged(trainer, "reward")) == 2


# with a value model


def value_model() -> tuple[ValueModel, torch.Tensor]:
    """A model whose values differ between states, and the states of 16 samples and 3 steps."""
    generator = torch.Generator().manual_seed(2)
    states, model = torch.randn(16, 3, STATE_SIZE, generator=generator), ValueModel()
    torch.nn.init.normal_(model.layers[-1].weight, generator=generator)
    model.is_calibrated.fill_(True)
    return model, states


@pytest.mark.parametrize(("gamma", "lam", "batches"), [(1.0, 1.0, 1), (0.9, 0.5, 2)])
def test_advantages_of_each_step(gamma, lam, batches):
    (model, states), rewards = value_model(), random_rewards()
    divergences = torch.rand(16, 3, generator=torch.Generator().manual_seed(1))
    args = settings(
        advantage_estimator="gae", gamma=gamma, gae_lambda=lam, kl_reward=0.3, num_batches_per_step=batches
    )
    mine = torch.arange(4, 12)
    estimated = found(args, rewards, mine, divergences=divergences, states=states, model=model)
    received = -0.3 * divergences.double() / 3
    received[:, -1] += torch.tensor(rewards[0], dtype=torch.float64)
    with torch.no_grad():
        values = model(states)
    expected = estimate_advantages(received, values.double(), gamma, lam)
    assert_close(estimated.targets.returns, (expected + values)[mine])
    assert_close(estimated.targets.values, values[mine])
    assert estimated.columns["reward"] == pytest.approx(rewards[0][4:12])  # of the samples of this process
    assert estimated.columns["value"] == pytest.approx(values[mine][:, 0].tolist())
    assert len(estimated.result.rewards) == 16
    normal = torch.cat([(part - part.mean()) / part.std() for part in expected.chunk(batches)])
    assert_close(estimated.advantages, normal[mine])
    raw = settings(advantage_estimator="gae", gamma=gamma, gae_lambda=lam, kl_reward=0.3, scale_rewards="none")
    given = {"divergences": divergences, "states": states, "model": model}
    assert_close(found(raw, rewards, mine, **given).advantages, expected[mine])
    if gamma == lam == 1:
        assert_close(expected[:, 0], torch.tensor(rewards[0]) - 0.3 * divergences.mean(1) - values[:, 0])


def test_clip_threshold_and_missing_rewards_of_a_value_model():
    model, states = value_model()
    rewards = random_rewards()
    rewards[0][5] = math.nan
    rewards[0][12:] = [-100.0, -101.0, -102.0, -103.0]
    args = settings(advantage_estimator="gae", reward_threshold=-50.0, advantage_clip=0.5)
    estimated = found(args, rewards, states=states, model=model)
    assert estimated.advantages[5].eq(0).all() and estimated.targets.returns[5].isnan().all()
    assert estimated.advantages[12:].eq(0).all() and estimated.targets.returns[12:].isfinite().all()
    assert estimated.advantages.abs().max() == 0.5 and estimated.advantages.isfinite().all()


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_clipped_are_the_advantages_of_a_value_model(scale_rewards):
    """The share of what is trained on, not of the rewards' distances to their mean."""
    model, states = value_model()
    args = settings(advantage_estimator="gae", gae_lambda=0.5, advantage_clip=0.8, scale_rewards=scale_rewards)
    estimated = found(args, random_rewards(), states=states, model=model)
    share = (estimated.advantages.abs() == torch.tensor(0.8)).double().mean().item()
    assert estimated.metrics["frac_advantage_clipped"] == share and 0 < share < 1


def test_groups_of_equal_rewards_are_none_to_a_value_model():
    model, states = value_model()
    rewards = [[float(place // 4) for place in range(16)]]
    alone = found(settings(), rewards)
    assert alone.result.frac_reward_zero_std == 1 and alone.advantages.eq(0).all()
    estimated = found(settings(advantage_estimator="gae"), rewards, states=states, model=model)
    assert estimated.result.frac_reward_zero_std == 0 and estimated.advantages.ne(0).all()
    single = settings(advantage_estimator="gae", num_generations=1)
    assert found(single, random_rewards(), states=states, model=model).advantages.ne(0).all()


def test_the_first_rollout_sets_the_scales_of_the_model():
    model, states = ValueModel(), value_model()[1]
    found(settings(advantage_estimator="gae"), [[math.nan] * 16], states=states, model=model)
    assert not model.is_calibrated
    known, seen = 1000 + torch.tensor(random_rewards()[0][:15]), states[:15].flatten(0, 1)
    rewards = [[*known.tolist(), math.nan]]  # what is not scored does not count
    estimated = found(settings(advantage_estimator="gae"), rewards, states=states, model=model)
    assert model.is_calibrated and estimated.metrics["value/mean"] == pytest.approx(known.mean().item(), rel=1e-6)
    assert_close(model.reward_std, known.std(correction=0))
    assert_close(
        torch.stack([model.state_mean, model.state_std]), torch.stack([seen.mean(0), seen.std(0, correction=0)])
    )
    assert estimated.metrics["value/explained_variance"] == pytest.approx(0, abs=1e-6)
    before = model.reward_mean.clone()
    found(settings(advantage_estimator="gae"), random_rewards(), states=states, model=model)
    assert torch.equal(model.reward_mean, before)


def test_explained_variance():
    returns = torch.tensor([[0.1], [0.2], [0.4], [math.nan]])
    states = torch.zeros(4, 1, STATE_SIZE)
    assert measure_values(ValueTargets(states, returns.nan_to_num(), returns))["value/explained_variance"] == 1
    worse = measure_values(ValueTargets(states, -returns.nan_to_num(), returns))
    assert worse["value/explained_variance"] == pytest.approx(1 - 4)
    assert "value/explained_variance" not in measure_values(ValueTargets(states, returns, torch.ones(4, 1)))


def test_advantages_by_which_samples_are_chosen_are_not_clipped():
    rewards = [[0.0, 20.0, 40.0, 60.0]]
    clipped, free = (
        found(settings(scale_rewards="none", advantage_clip=5.0, loss_type=name), rewards) for name in ("grpo", "dpo")
    )
    assert clipped.advantages.abs().max() == 5.0 and len(free.advantages.unique()) == 4


def test_samples_weigh_by_what_they_can_teach():
    rewards = torch.tensor(random_rewards()).T
    rewards[5], rewards[12:] = math.nan, 1.0

    def weights(**changed):
        estimator = AdvantageEstimator(settings(**changed), ["vq"], [1.0])
        return estimator.weigh(estimator(rewards, torch.arange(16)), torch.arange(16)).weights

    assert weights() is None
    assert weights(loss_type="dpo").tolist() == [1.0] * 5 + [0.0] + [1.0] * 10  # no pair holds what is not scored
    expected = [16 / 11] * 5 + [0.0] + [16 / 11] * 6 + [0.0] * 4
    assert weights(drop_zero_advantages=True).tolist() == pytest.approx(expected)
    rewards[5] = 0.0
    assert weights(loss_type="dpo") is None


def test_metrics_of_each_reward_leave_out_what_it_did_not_score():
    metrics = found(settings(), [[1.0, 2.0, 6.0, math.nan] * 4, [math.nan] * 15 + [3.0]], weights=(1.0, 1.0)).metrics
    assert metrics["rewards/vq/mean"] == pytest.approx(3.0) and metrics["rewards/mq/mean"] == 3.0
    assert metrics["rewards/vq/std"] == pytest.approx(torch.tensor([1.0, 2.0, 6.0] * 4).std().item())
    assert "rewards/mq/std" not in metrics
    nothing = found(settings(), [[math.nan] * 16]).metrics
    assert not {"reward", "rewards/vq/mean"} & nothing.keys()
