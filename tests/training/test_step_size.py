"""The learning rate that regulates itself: the controller against a reference in float64, and its runs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_runs import SMOOTH, brightness, logged, trainer_for
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from diffusion_grpo.rollout.runtime import Metrics
from diffusion_grpo.training.step_size import StepSize

BACKEND = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), gather=lambda tensor: tensor)
SIZE, UPDATES, CHANGE = 1000, 40, 0.3


def make(predict, limit=100.0, change=CHANGE, schedule=lambda update: 1.0):
    """A controller of plain gradient descent on one vector, whose prediction is `predict(vector)`."""
    weight = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=limit)
    step_size = StepSize(change, lambda batch: predict(weight.detach()), BACKEND, Metrics())
    step_size.attach(optimizer)
    step_size.attach(optimizer)  # Trainer prepares an optimizer twice
    state = TrainerState(max_steps=UPDATES)
    step_size.on_train_begin(None, state, None)
    return step_size, weight, optimizer, LambdaLR(optimizer, schedule), state


def test_the_rate_follows_a_reference():
    """Gradients change their size by a factor of 30; the schedule warms up and falls."""
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(UPDATES, SIZE)) * generator.uniform(0.1, 3.0, size=(UPDATES, 1))
    schedule = [min(1.0, (update + 1) / 4) * (1 - update / UPDATES) for update in range(UPDATES + 1)]
    step_size, weight, optimizer, scheduler, state = make(
        lambda weight: [(weight.clone(), 2 * weight)], schedule=lambda update: schedule[update]
    )
    expected, rate, gains, target = np.ones(SIZE), 100.0 * 1e-3, [], CHANGE / UPDATES**0.5
    changes = []
    for update, gradient in enumerate(gradients):
        step_size.watch(None)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        scheduler.step()
        step_size.on_step_end(None, state, None)
        moved = expected - rate * schedule[update] * gradient
        changes.append(np.linalg.norm(moved - expected) / np.linalg.norm(expected))
        if gains:  # by the last measurement, no update is larger than the target
            assert gains[-1] * rate * schedule[update] <= target * schedule[update] * 1.000001
        gains.append(changes[-1] / (rate * schedule[update]))
        rate = min(32 * rate, target / max(gains[-1], np.median(gains[-5:])))
        expected = moved
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(100.0 * schedule[update + 1])  # as without it
    assert step_size.metrics.values["prediction/change"] == pytest.approx(changes, rel=1e-5)
    assert 0.2 * target < np.median(changes) < target


def test_the_rate_stays_below_the_limit_and_a_skipped_update_counts_for_nothing():
    step_size, weight, optimizer, _, state = make(lambda weight: [(weight.clone(), weight.clone())], limit=1e-3)
    for _ in range(9):
        step_size.watch(None)
        before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
        optimizer.step()
        step_size.on_step_end(None, state, None)
    assert (before - weight).detach().numpy() == pytest.approx(1e-3)
    kept = str(state.stateful_callbacks)
    step_size.watch(None)
    step_size.on_step_end(None, state, None)  # without a step, as fp16 does where gradients overflow
    assert str(state.stateful_callbacks) == kept and len(step_size.metrics.values["prediction/change"]) == 9


def test_updates_without_a_gradient_measure_nothing():
    """Momentum may still move the weights; without any, the rate would grow until the first gradient came."""
    step_size, weight, optimizer, _, state = make(lambda weight: [(weight.clone(), weight.clone())])
    rates = []
    for has_gradient in (False, False, True, False):
        step_size.watch(None)
        step_size.has_gradient, weight.grad = has_gradient, torch.full_like(weight, float(has_gradient))
        optimizer.step()
        step_size.on_step_end(None, state, None)
        rates.append(state.stateful_callbacks["StepSize"]["rate"])
    assert rates[:2] == [pytest.approx(0.1)] * 2 and rates[2] == rates[3] != rates[1]
    assert step_size.metrics.values["prediction/change"] == [pytest.approx(0.1)]


def test_a_schedule_that_replaces_the_rate_multiplies_it_too():
    """`reduce_lr_on_plateau` sets no `initial_lr`; a schedule may also begin at 0, and a rate of 0 trains nothing."""
    step_size, weight, optimizer, _, state = make(lambda weight: [(weight.clone(), weight.clone())], limit=1.0)
    del optimizer.param_groups[0]["initial_lr"]
    for rate, moved in ((0.0, 0.0), (1.0, 1e-3), (0.1, 3.2e-3)):
        optimizer.param_groups[0]["lr"] = rate
        step_size.watch(None)
        before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
        optimizer.step()
        step_size.on_step_end(None, state, None)
        assert (before - weight).detach().numpy() == pytest.approx(moved)
    assert make(lambda weight: [], limit=0.0)[2].step() is None


def test_rounding_is_no_change():
    """Each prediction has an error of 1 %, as in bfloat16; the update changes it by 0.2 %."""
    noise = torch.Generator().manual_seed(0)

    def predict(weight):
        return [tuple(weight + 0.01 * torch.randn(100, SIZE, generator=noise) for _ in range(2))]

    step_size, weight, optimizer, _, state = make(predict, limit=2.0)
    step_size.watch(None)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    step_size.on_step_end(None, state, None)
    assert step_size.metrics.values["prediction/change"] == [pytest.approx(0.002, rel=0.1)]


TOKENS = {"name": "glm_image", "train_component": "vision_language_encoder", "epsilon": 0.2, "rewards": brightness}
TOKENS |= {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


@pytest.mark.parametrize(
    "settings",
    [
        SMOOTH | {"num_iterations": 2},
        SMOOTH | {"loss_type": "nft", "num_inference_steps": 10},
        SMOOTH | {"name": "sd15", "lora": False, "bf16": True, "max_ratio_error": None, "learning_rate": 0.01},
        TOKENS,
    ],
    ids=["grpo", "nft", "full, bf16", "tokens"],
)
def test_runs_reach_the_target(tmp_path, settings):
    """From far below, in steps of 32; 10 updates of a tiny random network."""
    usual = {"learning_rate": 1.0, "max_steps": 10, "gradient_accumulation_steps": 1, "num_inference_steps": 3}
    trainer = trainer_for(tmp_path, **usual | settings, target_change=0.1)
    trainer.train()
    rates, changes = logged(trainer, "learning_rate"), logged(trainer, "prediction/change")
    target = 0.1 / 10**0.5
    assert rates[0] == pytest.approx(1e-3 * trainer.args.learning_rate) and changes[0] < target
    assert max(now / last for last, now in zip(rates, rates[1:])) <= 32.01
    assert 0.25 * target < np.median(changes[-4:]) < 2 * target


def test_passes_from_the_whole_micro_batch_are_measured(tmp_path):
    """Of ten passes the first, the fifth and the ninth, for the samples and for nearby ones, before and after."""
    settings = {"loss_type": "nft", "num_inference_steps": 11, "trained_steps": [1, 11], "max_steps": 1}
    trainer = trainer_for(tmp_path, **settings, target_change=0.1)
    steps, predict = [], trainer.passes._predict
    trainer.passes._predict = lambda part, step: steps.append(step) or predict(part, step)
    trainer.train()
    assert steps == [1, 1, 5, 5, 9, 9] * 2


def test_a_run_of_equal_rewards_measures_no_change(tmp_path):
    columns = {"weight": [0.0, 0.0, 1.0, 1.0]}  # two prompts per update: only the second update has a gradient
    settings = SMOOTH | {"columns": columns, "shuffle_dataset": False, "optim": "sgd", "max_steps": 2}
    trainer = trainer_for(tmp_path, **settings, learning_rate=1.0, target_change=0.1)
    trainer.train()
    assert len(logged(trainer, "prediction/change")) == 1
    assert logged(trainer, "learning_rate") == pytest.approx([1e-3, 1e-3])


def test_an_update_that_overflows_measures_nothing(tmp_path):
    """fp16 skips it; a fused optimizer does so within its step, which seems to have changed nothing."""
    trainer = trainer_for(tmp_path, target_change=0.1)
    trainer.args.fp16 = True  # refused on a CPU
    for norm, has_gradient in ((2.0, True), (torch.inf, False), (torch.nan, False), (0.0, False), (2.0, True)):
        trainer._get_grad_norm(trainer.model, torch.tensor(norm))
        assert trainer.step_size.has_gradient == has_gradient
