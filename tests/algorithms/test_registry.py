"""`loss_type` and `loss_kwargs`: names, losses and algorithms of one's own, and what is refused."""

import math
from functools import partial

import pytest
import torch
from tiny_runs import logged, trained_weights, trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms import ALGORITHMS
from diffusion_grpo.algorithms.grpo import GRPO
from diffusion_grpo.algorithms.losses import LossInputs, LossOutput, grpo, sum_loss
from diffusion_grpo.algorithms.registry import check_loss_kwargs, find_algorithm, load_algorithm
from examples.own_algorithm import Reinforce

NOT_A_LOSS = math.pi


def reinforce(given: LossInputs, *, scale: float, offset: float = 0.0) -> LossOutput:
    """A loss of the user's own, with settings."""
    loss = -((given.advantages + offset) * given.log_prob).mean()
    return LossOutput(scale * loss, {"offset": torch.tensor(offset), "scale": scale})  # numbers do as well


class NoPasses:
    """No algorithm."""

    def loss(self, *args):
        """Half of one."""


def path(thing) -> str:
    return f"{thing.__module__}.{thing.__name__}"


# what `loss_type` may be


def test_names_paths_classes_and_functions_are_found():
    assert find_algorithm("grpo") is ALGORITHMS["grpo"] is GRPO
    assert find_algorithm("diffusion_grpo.algorithms.losses.grpo") is grpo
    assert find_algorithm("diffusion_grpo.losses.grpo") is grpo
    assert find_algorithm(path(reinforce)) is find_algorithm(reinforce) is reinforce
    assert find_algorithm(path(Reinforce)) is find_algorithm(Reinforce) is Reinforce


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpro", "'grpo'"),
        ("Flow-GRPO", "loss_type='grpo'"),  # which others call so
        ("nowhere.at_all", "nowhere"),
        ("diffusion_grpo.algorithms.losses.ppo", "ppo"),
        (f"{__name__}.NOT_A_LOSS", "NOT_A_LOSS"),
        (f"{__name__}.NoPasses", "NoPasses"),
    ],
)
def test_what_is_not_known_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_algorithm(name)


# and `loss_kwargs`


@pytest.mark.parametrize(
    ("loss_type", "loss_kwargs", "message"),
    [
        ("grpo", {"epsilon": 1.0}, "epsilon"),
        ("grpo", {"loss": "x"}, "'loss'"),
        (path(reinforce), {"scal": 1.0}, "'scale'"),
        (path(reinforce), {"given": 1.0, "scale": 1.0}, "'given'"),
        (path(reinforce), {"offset": 1.0}, "needs scale"),
        (path(reinforce), None, "needs scale"),
        (path(Reinforce), {"beta": 1.0}, "beta"),
        ("dppo", {"threshold": 0}, "threshold"),
        ("grpo_guard", {"clip_range": "4e-6"}, "clip_range"),
    ],
)
def test_the_config_refuses_settings_that_the_loss_does_not_have(loss_type, loss_kwargs, message):
    with pytest.raises(ValueError, match=message):
        DiffusionGRPOConfig("out", use_cpu=True, loss_type=loss_type, loss_kwargs=loss_kwargs)


def test_settings_of_functions():
    """One that takes any gets any but the run's; one may have a setting with the name of one of these."""
    check_loss_kwargs(lambda given, **settings: None, {"anything": 1})
    with pytest.raises(ValueError, match="beta"):
        check_loss_kwargs(lambda given, **settings: None, {"beta": 1})
    check_loss_kwargs(lambda given, *, epsilon: None, {"epsilon": 0.1})
    with pytest.raises(ValueError, match="needs epsilon"):
        check_loss_kwargs(lambda given, *, epsilon: None, None)


class Deaf(Reinforce):
    """Takes none of the run's settings."""

    def __init__(self):
        super().__init__(beta=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.1}, "beta"),
        ({"epsilon_high": 0.3}, "epsilon_high"),
        ({"max_ratio_error": None}, "max_ratio_error"),
        ({"old_log_prob": "replay"}, "anchor"),
        ({"multi_objective_aggregation": "loss_per_reward"}, "reward_weights"),
    ],
)
def test_settings_of_the_run_that_a_class_does_not_take_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DiffusionGRPOConfig("out", use_cpu=True, loss_type=path(Deaf), **settings)
    plain = {"loss_type": path(Deaf), "multi_objective_aggregation": "normalize_then_sum"}
    DiffusionGRPOConfig("out", use_cpu=True, **plain)  # what only changes the advantages has an effect


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.log_prob.mean(), "LossOutput"),
        (lambda x: LossOutput(x.log_prob, {}), "shape"),
        (lambda x: LossOutput(0.5, {}), "0.5"),
        (lambda x: LossOutput(x.log_prob.detach().mean(), {}), "gradient"),
    ],
)
def test_what_a_loss_of_the_users_own_must_not_return(returned, message):
    log_prob, settings = torch.zeros(2, requires_grad=True), {"ref_mean": None, "beta": 0.0}
    settings |= {"epsilon": 1e-4, "epsilon_high": 1e-4, "mean": torch.zeros(2, 4), "std": torch.tensor(0.1)}
    inputs = LossInputs(log_prob=log_prob, old_log_prob=log_prob.detach(), advantages=torch.ones(2), **settings)
    for weights in (None, torch.ones(2)):
        with pytest.raises(TypeError, match=message):
            sum_loss(returned, inputs, weights)


def test_a_function_becomes_grpos_step_loss_and_a_class_gets_what_it_names():
    run = {"beta": 0.5, "epsilon": 0.2, "take_turns": True}
    plain = load_algorithm("diffusion_grpo.losses.grpo", None, **run)
    assert isinstance(plain, GRPO) and plain.step_loss is grpo
    assert (plain.beta, plain.epsilon, plain.epsilon_high, plain.take_turns) == (0.5, 0.2, 0.2, True)
    partly = load_algorithm(path(reinforce), {"scale": 3.0}, **run).step_loss
    assert isinstance(partly, partial) and partly.func is reinforce and partly.keywords == {"scale": 3.0}
    own = load_algorithm(path(Reinforce), {"temperature": 2.0}, **run)
    assert isinstance(own, Reinforce) and (own.beta, own.temperature) == (0.5, 2.0)

    class Wider(GRPO):
        """Inherits the constructor, so it gets all that GRPO gets."""

    wider = load_algorithm(Wider, None, **run)
    assert isinstance(wider, Wider) and wider.epsilon == 0.2 and wider.step_loss is grpo


# training


def test_an_algorithm_of_ones_own_trains(tmp_path):
    """The class and the function are one loss, summed over samples, written in two ways."""
    runs = []
    for loss, settings in ((reinforce, {"scale": 1.0}), (Reinforce, {}), (Reinforce, {"temperature": 1e3})):
        folder = tmp_path / str(len(runs))
        runs.append(trainer_for(folder, max_grad_norm=0.0, loss_type=path(loss), loss_kwargs=settings))
        runs[-1].train()
    function, own, cooler = runs
    expected = trained_weights(function)
    assert max((value - expected[name]).abs().max() for name, value in trained_weights(own).items()) < 1e-6
    assert logged(function, "scale") == [1.0, 1.0] and logged(function, "offset") == [0.0, 0.0]
    assert isinstance(own.learner.algorithm, Reinforce) and not logged(own, "ratio/mean")
    assert logged(own, "reinforce/drift") == [0.0, 0.0] and len(logged(own, "reinforce/log_prob")) == 2
    assert logged(cooler, "grad_norm")[0] == pytest.approx(logged(own, "grad_norm")[0] / 1e3, rel=1e-3)
