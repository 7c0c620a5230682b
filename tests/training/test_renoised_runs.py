"""Runs of the losses on re-noised samples on tiny pipelines: every kind of scheduler, checkpoints, old policies."""

import logging
import math

import pytest
import torch
from diffusers.models.attention import FeedForward
from tiny_runs import (
    RENOISED,
    are_equal,
    assert_resumes,
    brightness,
    difference,
    finished_run,
    first_frame_brightness,
    joined_trajectory,
    logged,
    policy_weights,
    trained_weights,
    trainer_for,
)
from transformers import trainer_callback

from diffusion_grpo.algorithms import ALGORITHMS
from diffusion_grpo.algorithms.base import RatioError
from diffusion_grpo.algorithms.dgpo import DPO
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.trajectory import CleanSamples
from diffusion_grpo.rollout import generate
from diffusion_grpo.rollout.passes import Passes

SHORT = {"gradient_accumulation_steps": 1, "num_inference_steps": 3}
# an old policy that is well behind, so that it cannot be mistaken for the policy
BEHIND = {"loss_type": "nft", "loss_kwargs": {"decay_rate": 0.3, "decay_max": 0.9}}
VIDEOS = {"cosmos", "wan", "wan_experts"}


def trained(folder, name="sd3", **settings):
    trainer = trainer_for(
        folder, name, **{"rewards": first_frame_brightness if name in VIDEOS else brightness, **settings}
    )
    before = trained_weights(trainer)
    trainer.train()
    return trainer, before


def has_moved(trainer, before):
    return not are_equal(trained_weights(trainer), before)


# Evaluations


def test_evaluations_compare_the_policy_with_its_reference(tmp_path):
    """A LoRA has a reference whatever beta is, so what these losses tend to inflate is logged by default."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer, _ = trained(tmp_path, **SHORT, loss_type="nft", **settings)
    (distance,), (ratio,) = logged(trainer, "eval_kl"), logged(trainer, "eval_velocity/ratio_to_ref")
    divergences, compared = trainer.learner.run_passes(trainer.passes.compare, trainer.loader.buffer.micro_batch(0))
    assert distance == pytest.approx(divergences.mean().item()) and distance > 0
    assert ratio == pytest.approx(compared["velocity/ratio_to_ref"]) and ratio not in (0.0, 1.0)


# Kinds of schedulers and networks


# DDIM, consistency and EDM schedulers, and videos
KINDS = [("sd15", "nft"), ("lcm", "dgpo"), ("cosmos", "dpo"), ("wan", "awm"), ("sd15", "dpo"), ("cosmos", "nft")]
KINDS += [("modular_wan", "nft")]


@pytest.mark.parametrize(("name", "loss"), [*(("sd3", loss) for loss in RENOISED), *KINDS])
def test_every_loss_and_every_kind_train(tmp_path, name, loss):
    trainer, before = trained(tmp_path, name, **SHORT, loss_type=loss)
    assert len(logged(trainer, "loss")) == 2 and all(map(math.isfinite, logged(trainer, "loss")))
    assert min(logged(trainer, "grad_norm")) > 0 and has_moved(trainer, before)
    assert logged(trainer, "prediction/max_error") == [0.0] * (loss != "dpo")  # which has no old policy
    assert isinstance(joined_trajectory(trainer), CleanSamples)
    if ALGORITHMS[loss].recording.reference:  # at the start the policy is its reference
        assert logged(trainer, "velocity/ratio_to_ref")[0] == 1.0
        assert logged(trainer, "kl")[0] == 0.0 < logged(trainer, "kl")[1]
    if loss != "dpo":
        assert logged(trainer, "old/distance")[0] == 0.0 < logged(trainer, "old/distance")[1]


@pytest.mark.parametrize("loss", ["nft", "dpo"])
def test_two_experts_take_turns(tmp_path, loss):
    settings = {"num_inference_steps": 6, "gradient_accumulation_steps": 1, "max_steps": 1, "loss_type": loss}
    trainer, before = trained(tmp_path, "wan_experts", **settings)
    moved = {
        name.split(".")[0] for name, value in trained_weights(trainer).items() if not torch.equal(value, before[name])
    }
    assert moved == {"transformer", "transformer_2"}
    assert logged(trainer, "prediction/max_error") == [0.0] * (loss != "dpo")


@pytest.mark.parametrize("loss", ["nft", "dpo"])
def test_all_weights_with_an_old_policy_and_a_reference(tmp_path, loss):
    trainer, before = trained(tmp_path, **SHORT, lora=False, beta=0.1, loss_type=loss, learning_rate=1e-4)
    assert has_moved(trainer, before) and logged(trainer, "prediction/max_error") == [0.0] * (loss != "dpo")
    assert logged(trainer, "kl")[0] == 0.0 < logged(trainer, "kl")[1]
    reference = trainer.learner.reference.weights.exact()
    assert all(torch.equal(*pair) for pair in zip(reference, before.values(), strict=True))
    assert (trainer.learner.old_policy is None) == (loss == "dpo")


@pytest.mark.parametrize(("loss", "size"), [("nft", 2), ("awm", 8), ("dpo", 2)])
def test_rollouts_have_batches_of_their_own(tmp_path, loss, size):
    """Nothing of a rollout is replayed, so the first predictions are found again whatever the batches were."""
    settings = SHORT | {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 3}
    trainer, _ = trained(tmp_path, **settings, rollout_batch_size=size, loss_type=loss)
    assert logged(trainer, "prediction/max_error") == [0.0] * 2  # first updates of two rollouts
    if loss == "awm":
        ratios = logged(trainer, "ratio/max")
        assert ratios[0] == ratios[2] == 1.0 < ratios[1]


def test_rows_may_differ_in_size(tmp_path):
    settings = {"columns": {"height": [32, 16, 32, 16], "width": [32, 16, 32, 16]}, "height": None, "width": None}
    settings |= SHORT | {"per_device_train_batch_size": 8, "shuffle_dataset": False, "num_iterations": 2}
    trainer, before = trained(tmp_path, **settings, loss_type="nft")
    assert has_moved(trainer, before) and logged(trainer, "prediction/max_error") == [0.0]


def test_the_best_and_the_worst_of_each_group(tmp_path):
    """DPO compares no others, so with best_of_n=2 their passes are saved and the update is the same."""
    settings = SHORT | {"loss_type": "dpo", "max_steps": 1, "optim": "sgd", "learning_rate": 1e-3}
    every, before = trained(tmp_path / "every", **settings)
    chosen, _ = trained(tmp_path / "chosen", **settings, per_device_train_batch_size=2, best_of_n=2)
    assert len(every.loader.buffer.rows) == 4 and len(chosen.loader.buffer.rows) == 2
    assert logged(chosen, "reward") == logged(every, "reward")
    after = trained_weights(every)
    assert difference(trained_weights(chosen), after) < 1e-3 * difference(after, before) > 0


def test_zero_advantages_can_be_left_out(tmp_path):
    def halves(images, prompts, **columns):  # one of two prompts says nothing
        return [
            value if prompts[0] == prompt else 0.0 for value, prompt in zip(brightness(images), prompts, strict=True)
        ]

    settings = SHORT | {"loss_type": "nft", "per_device_train_batch_size": 8, "max_steps": 1, "rewards": halves}
    norms = [
        logged(trained(tmp_path / str(drops), **settings, drop_zero_advantages=drops)[0], "grad_norm")[0]
        for drops in (False, True)
    ]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)


def as_they_are(rewards, groups, *, weights, batches):
    """An advantage function: all above 0, as no baseline is taken off."""
    return (rewards * weights).nansum(1) + 1.0


def test_unscored_samples_are_in_no_pair_of_dpo(tmp_path, monkeypatch):
    """With an advantage function they would be the worst of each group."""
    seen, real = [], DPO.sample_losses
    monkeypatch.setattr(DPO, "sample_losses", lambda self, *args: seen.append(args[3]) or real(self, *args))
    leave_out = lambda images, **columns: [None, *brightness(images[1:])]  # noqa: E731
    trained(tmp_path, **SHORT, loss_type="dpo", max_steps=1, rewards=leave_out, advantage_fn=f"{__name__}.as_they_are")
    assert seen
    for part in seen:
        assert part.weights.tolist() == [0.0, 1.0, 1.0, 1.0] and part.advantages[0] == 0.0 < part.advantages[1:].min()


# Passes


@pytest.mark.parametrize(("loss", "updates"), [("nft", 1), ("dpo", 1), ("awm", 2), ("dgpo", 2)])
def test_passes_are_those_of_the_loss_and_one_to_check(tmp_path, loss, updates):
    """The second rollout, when all shapes are known: one micro-batch, four steps of which three are trained."""
    settings = SHORT | {"num_inference_steps": 4, "num_iterations": updates, "max_steps": 2 * updates}
    trainer = trainer_for(tmp_path, **settings, loss_type=loss)
    network, calls, step = trainer.policy.network, [], trainer.training_step
    real = network.forward

    def train(*args, **kwargs):
        if trainer.state.global_step == updates:
            calls.clear()
        return step(*args, **kwargs)

    network.forward = lambda *args, **kwargs: calls.append(torch.is_grad_enabled()) or real(*args, **kwargs)
    trainer.training_step = train
    trainer.train()
    assert sum(calls) == 3 * updates  # with gradient
    free = 4 + 3 * (loss != "dpo")  # the rollout and the old policy
    free += 3 * updates * ALGORITHMS[loss].recording.reference  # the reference
    if updates == 2:  # awm's ratio needs each error under the policy of the rollout; for the others one is checked
        free += 3 if loss == "awm" else 1
    assert len(calls) - sum(calls) == free


# Steps and noise


@pytest.mark.parametrize("loss", RENOISED)
def test_noise_and_steps_of_a_group(tmp_path, loss):
    settings = {"loss_type": loss, "num_inference_steps": 9, "num_trained_steps": 3, "step_selection": "sample"}
    trainer, _ = trained(tmp_path, **SHORT | settings, per_device_train_batch_size=16, max_steps=1)
    samples = joined_trajectory(trainer)
    assert samples.steps.shape == (16, 3) and samples.steps.min() >= 1 and samples.steps.max() <= 8
    parts = samples.steps.double().sub(1).div(8 / 3).floor().long()  # of [1, 9) one from each of three
    assert ((parts - torch.arange(3)).abs() <= 1).all() and (samples.steps.diff(dim=1) > 0).all()
    seeds = [len(set(group.tolist())) for group in samples.seeds.view(4, 4)]
    steps = [len({tuple(row) for row in group.tolist()}) for group in samples.steps.view(4, 4, 3)]
    if ALGORITHMS[loss].recording.shares_noise:
        assert seeds == steps == [1] * 4 and len(samples.seeds.unique()) == 4
    else:
        assert seeds == [4] * 4 and max(steps) > 1
    assert len(samples.initial_seeds.unique()) == 16


# The old policy


def test_old_policy_lags_and_makes_the_rollouts_of_nft(tmp_path, monkeypatch):
    """Against the moving copy computed here from the policy's weights after each update."""
    shown, after = [], []

    def rolled_out(*args, **kwargs):
        shown.append(trained_weights(trainer))
        return real(*args, **kwargs)

    real = generate.RolloutRequest
    monkeypatch.setattr(generate, "RolloutRequest", rolled_out)
    trainer = trainer_for(tmp_path, **SHORT, **BEHIND, max_steps=4)
    old = {name: value.double() for name, value in trained_weights(trainer).items()}
    step = trainer.training_step

    def noted(*args, **kwargs):
        if trainer.state.global_step:
            after.append(policy_weights(trainer))
        return step(*args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", noted)
    trainer.train()
    assert len(shown) == 4 and len(after) == 3
    for rollout, (at_rollout, policy) in enumerate(zip(shown[1:], after, strict=True), start=1):
        decay = min(0.3 * rollout, 0.9)
        old = {name: decay * value + (1 - decay) * policy[name].double() for name, value in old.items()}
        assert all(torch.allclose(value.double(), old[name], atol=1e-8) for name, value in at_rollout.items())
        assert not are_equal(at_rollout, policy)
    assert logged(trainer, "old/distance")[-1] > 0


@pytest.mark.parametrize("loss", ["awm", "dgpo"])
def test_others_roll_out_by_the_policy_itself(tmp_path, monkeypatch, loss):
    shown = []

    def rolled_out(*args, **kwargs):
        shown.append(trained_weights(trainer))
        return real(*args, **kwargs)

    real = generate.RolloutRequest
    monkeypatch.setattr(generate, "RolloutRequest", rolled_out)
    kwargs = {"decay_rate": 0.3, "decay_max": 0.9}
    trainer = trainer_for(tmp_path, **SHORT, loss_type=loss, loss_kwargs=kwargs, max_steps=1)
    trainer.train()
    trained_on = trained_weights(trainer)
    trainer.train()  # its rollout is the policy's as it was left
    assert are_equal(shown[1], trained_on)


def test_an_old_policy_moves_once_per_rollout(tmp_path, monkeypatch):
    settings = SHORT | {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 7, "ema_decay": 0.9}
    warned = []
    monkeypatch.setattr(trainer_callback.logger, "warning", lambda message, *arguments: warned.append(message))
    trainer = trainer_for(tmp_path, **settings, **BEHIND)
    assert warned == []  # transformers warns where two callbacks are of one class
    moved, steps = [], []
    average = trainer.learner.old_policy.average
    real = average.step

    def step(parameters):
        steps.append(trainer.state.global_step)
        moved.append(average.get_decay(average.optimization_step + 1))
        return real(parameters)

    average.step = step
    trainer.train()
    assert steps == [4] and moved == [0.3]


def test_without_decay_later_updates_are_held_near_the_policy_of_the_rollout(tmp_path):
    settings = SHORT | {"loss_type": "nft", "num_iterations": 3, "max_steps": 4}
    trainer, _ = trained(tmp_path, **settings, loss_kwargs={"decay_max": 0.0})
    distances = logged(trainer, "old/distance")
    assert distances[0] == distances[3] == 0.0 < distances[1] < distances[2]


def test_a_prediction_that_is_not_found_again_stops_the_run(tmp_path, monkeypatch):
    real = Passes.predict_clean
    monkeypatch.setattr(Passes, "predict_clean", lambda *args: [found + 1e-3 for found in real(*args)])
    trainer = trainer_for(tmp_path, **SHORT, loss_type="nft")
    before = trained_weights(trainer)
    with pytest.raises(RatioError, match="Relative to their size, the first predictions after a rollout are off by"):
        trainer.train()
    assert not has_moved(trainer, before)
    never = finished_run(tmp_path / "never", **SHORT, loss_type="nft", max_ratio_error=None)
    (error,) = logged(never, "prediction/max_error")
    assert 1e-3 < error < 0.2  # at the last step, where the prediction makes up least of the clean sample


# how each loss comes by what its first predictions are compared with: an old policy that has not moved yet, or one
# pass or all errors before the first of several updates
CHECKED = [("nft", 1), ("dpo", 2), ("awm", 2)]


def change_outputs(trainer, kind, change):
    """Let layers of a kind change their output by numbers of their own generator: torch's is seeded in each call."""
    generator = torch.Generator().manual_seed(0)
    layers = [module for module in trainer.pipe.transformer.modules() if isinstance(module, kind)]
    for layer in layers:
        layer.register_forward_hook(
            lambda module, args, output: output * change(torch.rand(output.shape, generator=generator)).to(output)
        )
    assert layers


@pytest.mark.parametrize(("loss", "updates"), CHECKED)
def test_rounding_stops_no_run_in_half_precision(tmp_path, caplog, loss, updates):
    settings = SHORT | {"bf16": True, "loss_type": loss, "num_iterations": updates}
    trainer, _ = trained(tmp_path / "exact", **settings)
    assert logged(trainer, "prediction/max_error") == [0.0] and not [
        record for record in caplog.records if record.levelno >= logging.WARNING
    ]
    trainer = trainer_for(tmp_path, **settings)
    change_outputs(trainer, FeedForward, lambda uniform: 0.98 + 0.04 * uniform)
    trainer.train()
    (error,) = logged(trainer, "prediction/max_error")
    assert 1e-4 < error < 0.03
    assert sum("rounding in half precision explains it" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("loss", "updates"), CHECKED[:2])  # of errors alone, only larger differences are found
def test_randomness_stops_a_run_in_half_precision(tmp_path, loss, updates):
    trainer = trainer_for(tmp_path, **SHORT, bf16=True, loss_type=loss, num_iterations=updates)
    change_outputs(trainer, torch.nn.Dropout, lambda uniform: (uniform > 0.1) / 0.9)  # as if it was not switched off
    before = trained_weights(trainer)
    with pytest.raises(RatioError, match="this is more than half precision explains, and the update does not see"):
        trainer.train()
    assert not has_moved(trainer, before)


@pytest.mark.parametrize(("loss", "updates"), CHECKED)
def test_a_wrong_condition_stops_a_run_in_half_precision(tmp_path, loss, updates):
    """The passes with gradient see the prompts of other samples."""
    trainer = trainer_for(tmp_path, **SHORT, bf16=True, loss_type=loss, num_iterations=updates)
    real = trainer.pipe.transformer.forward

    def turned(*args, encoder_hidden_states, pooled_projections, **kwargs):
        if torch.is_grad_enabled():
            encoder_hidden_states, pooled_projections = -encoder_hidden_states, -pooled_projections
        return real(
            *args, encoder_hidden_states=encoder_hidden_states, pooled_projections=pooled_projections, **kwargs
        )

    trainer.pipe.transformer.forward = turned
    with pytest.raises(RatioError, match="more than half precision explains"):
        trainer.train()


# Checkpoints

SAVED = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
# a rollout is used for four updates, so most checkpoints lie within one
WITHIN = SAVED | {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 6}
WITHIN |= {"ema_decay": 0.9, "ema_update_interval": 2, "beta": 0.05}
FULL = WITHIN | {"lora": False, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_inference_steps": 3}
FULL |= {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(WITHIN | BEHIND, id="LoRA"),
        pytest.param(FULL | BEHIND, id="full, reference", marks=pytest.mark.slow),
    ],
)
def test_nft_resumes_bit_for_bit(tmp_path, settings):
    # within a rollout, and between two
    whole, *resumed = assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 1, 4)
    for step, again in zip((1, 4), resumed, strict=True):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        own = {path.name for path in checkpoint.iterdir() if path.is_dir()}
        assert {"policy", "old_policy"} <= own and ("reference" in own) == ("lora" in settings)
        assert (checkpoint / "rollout-rank0.safetensors").is_file() == (step == 1)
        assert again.state.global_step == 6
        one, other = whole.learner, again.learner
        for kept, read in ((one.average, other.average), (one.old_policy, other.old_policy)):
            assert all(torch.equal(*pair) for pair in zip(kept.shares, read.shares, strict=True))
        if "lora" in settings:
            references = zip(one.reference.weights.exact(), other.reference.weights.exact(), strict=True)
            assert all(torch.equal(*pair) for pair in references)
        for key in ("reward", "loss", "old/distance", "prediction/max_error", "kl"):
            assert logged(again, key) == logged(whole, key), key
    assert logged(whole, "prediction/max_error") == [0.0] * 2


@pytest.mark.parametrize("loss", ["awm", "dgpo", "dpo"])
def test_others_resume_within_a_rollout_bit_for_bit(tmp_path, loss):
    kwargs = BEHIND["loss_kwargs"] if loss != "dpo" else None
    settings = SHORT | SAVED | {"loss_type": loss, "loss_kwargs": kwargs, "num_iterations": 2, "max_steps": 4}
    whole, again = assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 1)
    assert logged(again, "loss") == logged(whole, "loss")


def test_evaluations_measure_the_policy_and_not_its_old_self(tmp_path):
    """Also with a moving average: rolled out is the old policy, trained the policy."""
    settings = SHORT | BEHIND | {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 1e-2}
    trainer, _ = trained(tmp_path, **settings)
    assert len(logged(trainer, "eval_reward")) == 2
    measured = trainer.evaluate(metric_key_prefix="again")
    assert measured["again_reward"] == logged(trainer, "eval_reward")[-1]
    with trainer.learner.old_policy.place(is_shown=True):
        assert trainer.evaluate(metric_key_prefix="old")["old_reward"] != measured["again_reward"]
    averaged, _ = trained(tmp_path / "average", **settings, ema_decay=0.5, ema_update_interval=1)
    assert are_equal(policy_weights(averaged), policy_weights(trainer))
    assert logged(averaged, "reward") == logged(trainer, "reward")


def test_a_pipeline_of_one_sample_per_call_is_refused(tmp_path, monkeypatch):
    """Wan VACE takes no list of prompts."""
    settings = SHORT | {"loss_type": "dgpo", "rewards": first_frame_brightness}
    trainer = trainer_for(tmp_path, "wan_vace", **settings)
    monkeypatch.setattr(generate, "RolloutRequest", None)  # before the first rollout
    with pytest.raises(UnsupportedPipeline, match="loss_type"):
        trainer.train()
