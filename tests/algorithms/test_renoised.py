"""What algorithms on re-noised samples share, on predictions made by hand; and the gradient they have in common."""

import functools
import math

import pytest
import torch
from renoised_parts import STEPS, changed, gradient, mean, problem, squares
from torch.testing import assert_close

from diffusion_grpo.algorithms import ALGORITHMS
from diffusion_grpo.algorithms.awm import AWM
from diffusion_grpo.algorithms.base import RatioError, Recording
from diffusion_grpo.algorithms.batch import MicroBatch
from diffusion_grpo.algorithms.dgpo import DGPO, DPO
from diffusion_grpo.algorithms.nft import NFT
from diffusion_grpo.algorithms.registry import check_loss_kwargs, load_algorithm
from diffusion_grpo.algorithms.renoised import Renoised
from diffusion_grpo.policy.trajectory import Denoised

RENOISED = {name: ALGORITHMS[name] for name in ("nft", "awm", "dgpo", "dpo")}
COMPARED = Recording(keeps="clean", old="error", reference=True)


class Plain(Renoised):
    """The bare denoising error; notes what it was given."""

    def sample_losses(self, now, old, distant, part, step):
        self.given = now, old, distant
        return now.error(), {"own": now.error().detach().max()}


def batch_of(given, is_on_policy=True, has_current_old=False):
    """A micro-batch of the samples, two to a call."""
    part = given.part
    samples = [part.trajectory[[index]] for index in range(len(part))]
    return MicroBatch(
        part.rows,
        samples,
        [[index, index + 1] for index in range(0, len(part), 2)],
        part.advantages,
        part.old_log_probs,
        part.make_inputs,
        weights=part.weights,
        is_on_policy=is_on_policy,
        groups=part.groups,
        group_size=part.group_size,
        has_current_old=has_current_old,
    )


# One pass


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sigma_by_element", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_a_pass_sums_the_losses_and_the_distance_to_the_reference(is_masked, sigma_by_element, has_weights):
    given = problem(is_masked=is_masked, sigma_by_element=sigma_by_element, has_weights=has_weights)
    out = Plain(beta=0.3).loss(given.policy, given.reference, given.part, 3)
    error, distance = squares(given, given.clean), squares(given, given.clean, given.reference.clean)
    expected = (given.weights * (error + 0.3 * distance)).sum()
    assert_close(out.loss, expected)
    assert_close(gradient(out.loss, given), gradient(expected, given))
    sizes = [mean(given, ((given.origin - x) / given.sigma) ** 2).sqrt() for x in (given.clean, given.reference.clean)]
    pulls = gradient(out.loss, given) * given.sigma
    assert out.metrics == pytest.approx(
        {
            "loss/kl": 0.3 * (given.weights * distance).mean().item(),
            "grad_size/step_03": pulls.flatten(1).norm(dim=1).mean().item(),
            "own": error.max().item(),
            "loss/policy": (given.weights * error).mean().item(),
            "denoising_error": error.mean().item(),
            "kl": distance.mean().item(),
            "velocity/ratio_to_ref": (sizes[0] / sizes[1]).mean().item(),
        }
    )
    assert given.policy.calls == given.reference.calls == [(list(range(6)), 3)]


def test_the_reference_is_asked_only_where_something_needs_it():
    given = problem()
    plain = Plain()
    metrics = plain.loss(given.policy, given.reference, given.part, 3).metrics
    assert not given.reference.calls and not {"kl", "velocity/ratio_to_ref"} & metrics.keys()
    comparing = type("Comparing", (Plain,), {"recording": COMPARED})()
    out = comparing.loss(given.policy, given.reference, given.part, 3)
    assert comparing.given[2] is not None and out.metrics["kl"] > 0
    assert_close(out.loss, squares(given, given.clean).sum())  # measured, and not trained on


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("weights", [[2.0, 0.0, 2.0, 0.0, 0.0, 2.0], [0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 6])
def test_samples_that_do_not_count_are_in_no_metric(weights, beta):
    given, kept = problem(), [index for index, weight in enumerate(weights) if weight]
    algorithm = type("Comparing", (Plain,), {"recording": COMPARED})(beta=beta)
    part = changed(given, weights=torch.tensor(weights, dtype=torch.float64))
    out = algorithm.loss(given.policy, given.reference, part, 3)
    assert out.metrics["loss/policy"] + out.metrics["loss/kl"] == pytest.approx(out.loss.item() / 6)
    error, distance = squares(given, given.clean), squares(given, given.clean, given.reference.clean)
    if kept:
        assert out.metrics["denoising_error"] == pytest.approx(error[kept].mean().item())
        assert out.metrics["kl"] == pytest.approx(distance[kept].mean().item())
        alone = algorithm.loss(given.policy, given.reference, changed(given, trajectory=part.trajectory[kept]), 3)
        assert out.metrics["velocity/ratio_to_ref"] == pytest.approx(alone.metrics["velocity/ratio_to_ref"])
    else:
        assert not {"denoising_error", "kl", "velocity/ratio_to_ref"} & out.metrics.keys()


@pytest.mark.parametrize("algorithm", [AWM(), NFT(), DGPO()])
def test_samples_that_do_not_count_are_in_no_metric_of_an_algorithm_either(algorithm):
    given, kept = problem(has_old=True), [0, 2, 5]
    part = changed(given, weights=torch.tensor([2.0, 0.0, 2.0, 0.0, 0.0, 2.0], dtype=torch.float64))
    metrics = algorithm.loss(given.policy, given.reference, part, 3).metrics
    expected = {"old/distance": squares(given, given.clean, given.old)[kept].mean().item()}
    if isinstance(algorithm, DGPO):
        ratio = torch.exp(squares(given, given.old) - squares(given, given.clean))[kept].detach()
        far = torch.where(given.advantages[kept] > 0, ratio > 1.01, ratio < 0.99)
        expected |= {"ratio/mean": ratio.mean().item(), "ratio/min": ratio.min().item()}
        expected |= {"ratio/max": ratio.max().item(), "clip_ratio/region_mean": far.double().mean().item()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_without_an_old_policy_the_policy_stands_for_it():
    given, plain = problem(), Plain()
    plain.loss(given.policy, None, given.part, 3)
    now, old, _ = plain.given
    assert torch.equal(old, now.clean) and not old.requires_grad
    given = problem(has_old=True)
    plain.loss(given.policy, None, given.part, 1)
    assert torch.equal(plain.given[1], given.part.trajectory.old_clean[:, STEPS.index(1)])


def test_passes_train_each_sample_at_its_own_steps():
    """The part of a pass holds those samples alone, with what the old policy took them for at that step."""
    given = problem(count=4, group_size=2, has_old=True)
    samples = given.part.trajectory
    samples.steps = torch.tensor([[1, 3], [1, 3], [1, 2], [2, 3]])
    passes = Plain().passes(batch_of(given))
    assert len(passes) == 1
    found = [(part.trajectory.seeds.tolist(), step) for part, step in passes[0]]
    assert found == [([0, 1], 1), ([0, 1], 3), ([2], 1), ([2, 3], 2), ([3], 3)]
    part, step = passes[0][3]
    expected = torch.stack([samples.old_clean[2, 1], samples.old_clean[3, 0]])
    assert torch.equal(part.old_clean(step), expected) and part.groups.tolist() == [6, 6]
    by_turns = Plain(take_turns=True).passes(batch_of(given))
    assert [{step for _, step in turn} for turn in by_turns] == [{1}, {2}, {3}]


# The first pass after a rollout


class NoErrors(Plain):
    """It asks for no errors of the rollout's policy, so that one pass is recorded."""

    recording = Recording(keeps="clean")


def relative(given, other):
    """(samples,) root mean square of what two predictions of v differ by, relative to that of the policy's."""
    velocity = (given.origin - given.clean) / given.sigma
    return (squares(given, given.clean, other) / mean(given, velocity**2)).sqrt().detach()


@pytest.mark.parametrize("is_masked", [False, True])
def test_drift_is_the_largest_difference_from_the_old_prediction_relative_to_its_size(is_masked):
    given = problem(has_old=True, is_masked=is_masked)
    part = changed(given, has_current_old=True)
    drift = Plain().loss(given.policy, None, part, 3).drift
    assert drift == pytest.approx(relative(given, given.old).max().item())
    assert Plain().loss(given.policy, None, given.part, 3).drift == 0.0  # the old policy has moved away


def test_drift_from_the_predictions_of_a_recorded_pass():
    given = problem()
    other = given.clean.detach() + 0.1 * torch.randn_like(given.clean)
    part = changed(given, recorded_clean={(seed, 3): other[seed] for seed in range(6)})
    algorithm = NoErrors(anchor="rollout")
    drift = algorithm.loss(given.policy, None, part, 3).drift
    assert drift == pytest.approx(relative(given, other).max().item()) and drift > 0.02
    assert algorithm.loss(given.policy, None, part, 1).drift == 0.0  # another pass than the recorded one


def test_of_recorded_errors_drift_is_the_least_difference_of_predictions():
    """It is reached where the prediction moves straight away from the target."""
    given = problem()
    moved = given.target + 1.5 * (given.clean.detach() - given.target)
    recorded = torch.zeros(6, 2, dtype=torch.float64)
    recorded[:, 1] = -squares(given, moved).detach()
    algorithm, part = Plain(anchor="rollout"), changed(given, old_log_probs=recorded)
    assert algorithm.loss(given.policy, None, part, 3).drift == pytest.approx(relative(given, moved).max().item())
    moved = given.clean.detach() + 0.1 * torch.randn_like(given.clean)
    recorded[:, 1] = -squares(given, moved).detach()
    assert 0 < algorithm.loss(given.policy, None, part, 3).drift < relative(given, moved).max().item()
    recorded[:, 1] = -squares(given, given.clean).detach()
    assert algorithm.loss(given.policy, None, part, 3).drift < 1e-14


def test_a_prediction_of_zero_does_not_differ_from_itself():
    """As of a network whose last layer is still 0."""
    clean = torch.ones(2, 5)
    nothing = Denoised(clean, clean, torch.tensor(0.8), clean, clean_at_zero=clean)
    assert nothing.difference(clean).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("drift", [1.1e-4, math.nan, math.inf])
def test_a_first_prediction_that_is_off_stops_the_run(drift):
    algorithm = Plain(anchor="rollout")
    with pytest.raises(RatioError, match="max_ratio_error=1e-04"):
        algorithm.check(batch_of(problem()), drift)
    assert algorithm.check(batch_of(problem()), 0.9e-4) == {"prediction/max_error": 0.9e-4}
    never = Plain(anchor="rollout", max_ratio_error=None).check(batch_of(problem()), drift)
    assert never == pytest.approx({"prediction/max_error": drift}, nan_ok=True)


def test_only_passes_that_were_recorded_are_compared():
    given = problem()
    algorithm = NoErrors(anchor="rollout")
    part = changed(given, recorded_clean={(seed, 3): given.clean.detach()[seed] for seed in range(6)})
    batch = batch_of(given)
    assert algorithm.check(batch, 0.0) == {}
    batch.recorded_clean = part.recorded_clean
    assert algorithm.check(batch, 0.0) == {"prediction/max_error": 0.0}
    assert batch.part([0, 1]).recorded_clean is part.recorded_clean
    assert algorithm.loss(given.policy, None, part, 3).drift == 0.0
    given.clean.data[0] = torch.nan
    assert math.isnan(algorithm.loss(given.policy, None, part, 3).drift)


@pytest.mark.parametrize("warns", [True, False])
@pytest.mark.parametrize("loss", ["nft", "grpo"])
def test_in_half_precision_one_process_warns_of_what_rounding_explains(caplog, loss, warns):
    algorithm = load_algorithm(loss, is_half_precision=True, anchor="rollout", warns=warns)
    batch, drifts = batch_of(problem(), has_current_old=True), (1e-4, 0.0625, 0.0625)  # 8 / 128
    assert [list(algorithm.check(batch, drift).values()) for drift in drifts] == [[drift] for drift in drifts]
    assert len(caplog.records) == warns
    for drift in (0.0626, math.nan, math.inf) if loss == "nft" else ():
        with pytest.raises(RatioError):
            algorithm.check(batch, drift)


def test_only_first_predictions_are_checked():
    given = problem()
    assert Plain(anchor="rollout").check(batch_of(given, is_on_policy=False), 1.0) == {}
    assert Plain().check(batch_of(given), 1.0) == {}  # nothing was recorded that it could be compared with
    assert NFT(anchor="rollout").check(batch_of(given), 1.0) == {}  # nor here, in another batch than the first
    with pytest.raises(RatioError):
        Plain().check(batch_of(given, has_current_old=True), 1.0)


# The old policy


def test_old_policies_by_the_two_schedules_of_diffusion_nft():
    first, second = NFT(), NFT(decay_rate=0.0075, decay_start=75, decay_max=0.999)
    found = [[algorithm.old_decay(n) for n in (0, 1, 75, 76, 300, 500, 1000)] for algorithm in (first, second)]
    assert found[0] == pytest.approx([0.0, 0.001, 0.075, 0.076, 0.3, 0.5, 0.5])
    assert found[1] == pytest.approx([0.0, 0.0, 0.0, 0.0075, 0.999, 0.999, 0.999])
    assert AWM().old_decay(1000) == DGPO().old_decay(1000) == 0.3


def test_an_old_policy_that_is_the_policy_of_each_rollout():
    """Updates of which there is one per rollout find it equal to the policy; later ones of a rollout do not."""
    for cls in (NFT, DGPO):
        assert cls(decay_max=0.0).old_decay is cls(decay_rate=0.0).old_decay is None
    for cls in (NFT, functools.partial(AWM, clip=0.1), DGPO):
        again = cls(decay_max=0.0, anchor="rollout").old_decay
        assert [again(n) for n in (0, 1, 1000)] == [0.0] * 3
    assert DPO().old_decay is DPO(anchor="rollout").old_decay is None
    assert AWM(ema_beta=0.0, clip=0.1, anchor="rollout").old_decay is None


# Settings

OUT_OF_RANGE = {  # the first setting of each is named
    "nft": [{"strength": 0.0}, {"strength": True}, {"advantage_range": 0}, {"decay_max": 1.0}, {"decay_rate": -0.1}]
    + [{"decay_rate": "1e-3"}, {"decay_start": -1}],
    "awm": [{"weight": "huber"}, {"power": 0}, {"clip": 0}, {"advantage_range": 0}, {"ema_beta": -1}, {"decay_max": 0}]
    # where nothing would limit how far an update goes, or a setting has no effect
    + [{"ema_beta": 0}, {"clip": 0.1, "ema_beta": 0}, {"decay_rate": 0.1, "ema_beta": 0, "clip": 0.1}]
    + [{"power": 0.5, "weight": "t"}],
    "dgpo": [{"preference_beta": 0}, {"clip": 0}, {"decay_max": math.nan}],
    "dpo": [{"preference_beta": 0}],
}


@pytest.mark.parametrize(
    ("name", "settings"), [(name, each) for name, settings in OUT_OF_RANGE.items() for each in settings]
)
def test_settings_out_of_range_are_refused(name, settings):
    with pytest.raises(ValueError, match=f"^loss_kwargs: .*{next(iter(settings))}"):
        check_loss_kwargs(name, settings)


def test_settings_in_range_are_taken():
    check_loss_kwargs("nft", {"strength": 0.1, "decay_max": 0.0, "decay_rate": 0, "decay_start": 0})
    check_loss_kwargs("awm", {"clip": 1e-5, "ema_beta": 0.1})
    check_loss_kwargs("awm", {"clip": 1e-5, "ema_beta": 0}, anchor="rollout")
    check_loss_kwargs("awm", {"decay_max": 0}, anchor="rollout")  # the average stays behind within a rollout


# Groups


@pytest.mark.parametrize("name", ["dgpo", "dpo"])
def test_torn_groups_are_refused(name):
    given, algorithm = problem(), ALGORITHMS[name]()
    algorithm.loss(given.policy, given.reference, given.part, 3)
    for groups in ([0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 2, 2, 2]):
        with pytest.raises(ValueError, match="'nft' or 'awm'"):
            algorithm.loss(given.policy, given.reference, changed(given, groups=torch.tensor(groups)), 3)


# All of them


@pytest.mark.parametrize("name", RENOISED)
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_all_have_the_same_first_order_gradient(name, advantage):
    """That of advantage times denoising error, where the old policy is the policy: they differ in what limits them."""
    given = problem(count=2, group_size=2, advantages=[advantage, -advantage])
    error = gradient((given.advantages * squares(given, given.clean)).sum(), given)
    # a comparison that is won for certain would count nothing
    soft = {"preference_beta": 1.0} if RENOISED[name].recording.reference else {}
    found = gradient(RENOISED[name](**soft).loss(given.policy, given.reference, given.part, 3).loss, given)
    for one, other in zip(found, error, strict=True):
        cosine = torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()
        assert cosine == pytest.approx(1.0, abs=1e-6)
