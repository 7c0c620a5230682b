"""`loss_type: draft`: the last steps are taken again from what entered them, and rewards are differentiated."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_pipelines
import torch
from datasets import Dataset
from recorded import make_policy
from tiny_runs import blue, logged, policy_weights, train_and_compare, trainer_for
from tiny_runs import brightness as not_differentiable

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms.base import RatioError
from diffusion_grpo.algorithms.draft import DRaFT
from diffusion_grpo.media.samples import as_tensor
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy
from diffusion_grpo.policy.trajectory import ROUNDING_OF_TWO, CleanSamples, Finished, RolloutRequest
from diffusion_grpo.rewards import load_rewards
from diffusion_grpo.training.preflight import RunRewards, guard_gradients, prepare_args

STEPS = 4
DRAFT = {"loss_type": "draft", "trained_steps": None, "noisy_steps": "trained", "num_generations": 1}
SHORT = DRAFT | {"gradient_accumulation_steps": 1, "num_inference_steps": 3}


@torch.no_grad()
def roll_out(policy, inputs, entries):
    seeds = torch.arange(1, len(entries) + 1)
    steps = [[entry] for entry in entries]
    return policy.rollout(inputs, RolloutRequest(seeds, seeds, STEPS, steps=steps, keeps="entered"))


@pytest.mark.parametrize("name", ["sd3", "flux", "sd15", "sdxl", "sd3_heun", "lcm", "wan", "modular_sd3"])
def test_the_last_steps_make_the_rollouts_samples_again(name):
    policy, inputs = make_policy(name)
    for entry in (0, 2, STEPS - 1):
        images, samples = roll_out(policy, inputs, [entry, entry])
        again, first = policy.finish(inputs, samples), policy.predict_entry(inputs, samples)
        assert len(first) == len(samples) and bool(first.any())  # of the network, not the blank output of a gate
        assert torch.equal(again.latents.detach(), samples.latents)
        frames = again.pixels.detach() if again.pixels.ndim == 5 else again.pixels.detach()[:, None]
        first = images[0][0] if isinstance(images[0], list) else images[0]
        levels = torch.from_numpy(np.array(first.convert("RGB"))).permute(2, 0, 1)
        assert (255 * frames[0, 0] - levels).abs().max() < 0.51
        again.pixels.sum().backward()
        assert all(weight.grad.isfinite().all() for weight in policy.network.parameters() if weight.grad is not None)
        assert sum(weight.grad is not None and bool(weight.grad.any()) for weight in policy.network.parameters()) > 5


def test_cosmos_is_refused_whose_safety_checker_takes_numpy():
    policy, inputs = make_policy("cosmos")
    samples = roll_out(policy, inputs, [STEPS - 1] * 2)[1]
    with pytest.raises(UnsupportedPipeline, match="safety checker"):
        policy.finish(inputs, samples)


def test_a_decoder_that_lets_no_gradient_through_is_refused(monkeypatch):
    policy, inputs = make_policy()
    samples = roll_out(policy, inputs, [STEPS - 1] * 2)[1]
    monkeypatch.setattr(policy.pipe.vae, "decode", torch.no_grad()(policy.pipe.vae.decode))
    with pytest.raises(UnsupportedPipeline, match="a gradient could flow"):
        policy.finish(inputs, samples)


def hand_written(pipe, inputs, latents, entry):
    """The gradient of Stable Diffusion 3 by the arithmetic of its paper and of guidance; no pipeline is called."""
    embeds = pipe.encode_prompt(
        prompt=inputs["prompt"], prompt_2=None, prompt_3=None, do_classifier_free_guidance=True, max_sequence_length=
        inputs.get("max_sequence_length", 256)
    )  # fmt: skip
    text, pooled = torch.cat([embeds[1], embeds[0]]), torch.cat([embeds[3], embeds[2]])
    pipe.scheduler.set_timesteps(STEPS)
    sigmas = pipe.scheduler.sigmas.to(latents)
    for step in range(entry, STEPS):
        time = pipe.scheduler.timesteps[step].expand(2 * len(latents))
        both = pipe.transformer(torch.cat([latents] * 2), text, pooled, time, return_dict=False)[0]
        plain, prompted = both.chunk(2)
        velocity = plain + inputs["guidance_scale"] * (prompted - plain)
        latents = latents + (sigmas[step + 1] - sigmas[step]) * velocity
    decoded = pipe.vae.decode(latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
    return (decoded / 2 + 0.5).clamp(0, 1)


@pytest.mark.parametrize("entry", [STEPS - 1, STEPS - 3])
def test_gradients_are_those_of_a_hand_written_loop(entry):
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.to(torch.float64)
    policy, inputs = DenoisingPolicy(pipe), inputs | {"guidance_scale": 3.0}
    samples = roll_out(policy, inputs, [entry, entry])[1]
    gradients = []
    weights = [weight for name, weight in pipe.transformer.named_parameters() if "context_embedder" not in name]
    for pixels in (
        policy.finish(inputs, samples).pixels,
        hand_written(pipe, inputs, samples.entered.double(), entry),
    ):
        loss = -blue(pixels).sum()
        gradients.append(torch.autograd.grad(loss, weights, allow_unused=True))
    found = [(one, other) for one, other in zip(*gradients) if one is not None]
    size = math.sqrt(sum(float(other.square().sum()) for _, other in found))
    error = math.sqrt(sum(float((one - other).square().sum()) for one, other in found))
    assert len(found) > 20 and size > 1e-6 and error < 1e-5 * size, (error, size)
    if entry == STEPS - 1:  # to a sigma of 0
        velocity = (samples.entered - samples.latents) / pipe.scheduler.sigmas[entry]
        torch.testing.assert_close(policy.predict_entry(inputs, samples).float(), velocity, rtol=1e-3, atol=1e-4)


def test_samples_may_enter_at_steps_of_their_own():
    policy, inputs = make_policy()
    _, samples = roll_out(policy, inputs, [1, 3])
    one = inputs | {"prompt": inputs["prompt"][1:]}
    torch.testing.assert_close(
        policy.finish(one, samples[1:]).latents.detach(), samples.latents[1:], rtol=1e-4, atol=1e-5
    )
    nearby = samples.perturb()  # what the last steps are given, not what they made
    assert (nearby.entered != samples.entered).all() and torch.equal(nearby.latents, samples.latents)


def test_the_distance_to_the_reference_is_weighted_by_beta():
    latents = torch.randn(2, 3, 4, requires_grad=True)
    shift = torch.tensor([0.5, 2.0]).view(2, 1, 1).expand(2, 3, 4)
    policy = SimpleNamespace(finish=lambda *_: Finished(torch.rand(2, 3, 8, 8), latents))
    reference = SimpleNamespace(finish=lambda *_: Finished(None, (latents - shift).detach()))
    part = SimpleNamespace(inputs={}, rows=[{}] * 2, trajectory=SimpleNamespace(latents=latents.detach()))
    algorithm = DRaFT(score_pixels=lambda pixels, rows: torch.tensor([1.0, 2.0]), beta=0.3)
    output = algorithm.loss(policy, reference, part, 0)
    torch.testing.assert_close(output.loss.detach(), torch.tensor(-3.0 + 0.3 * (0.5**2 + 2.0**2)))
    (gradient,) = torch.autograd.grad(output.loss, latents)
    torch.testing.assert_close(gradient, 0.3 * 2 * shift / 12)
    assert [output.metrics[name] for name in ("kl", "loss/kl")] == pytest.approx([2.125, 0.3 * 2.125])


def test_half_precision_explains_no_more_than_its_rounding():
    batch = SimpleNamespace(is_on_policy=True)

    def check(drift, **settings):
        return DRaFT(score_pixels=blue, **settings).check(batch, drift)

    assert check(ROUNDING_OF_TWO, is_half_precision=True) == {"prediction/max_error": ROUNDING_OF_TWO}
    for drift, settings in ((2 * ROUNDING_OF_TWO, {"is_half_precision": True}), (ROUNDING_OF_TWO, {})):
        with pytest.raises(RatioError, match="finished latents"):
            check(drift, **settings)


# Runs


def test_a_run_raises_its_reward_and_logs_as_every_other(tmp_path):
    own = {"max_steps": 8, "learning_rate": 5e-3, "eval_strategy": "steps", "eval_steps": 8, "eval_on_start": True}
    trainer = trainer_for(tmp_path, rewards=blue, **SHORT | own)
    trainer.train()
    rewards, (start, end) = logged(trainer, "reward"), logged(trainer, "eval_rewards/blue/mean")
    assert end > start + 0.01 and min(logged(trainer, "grad_norm")) > 0
    assert logged(trainer, "loss") == pytest.approx([-reward for reward in rewards], abs=5e-3)  # but for 8 bits
    assert logged(trainer, "prediction/max_error") == [0.0] * 8
    assert all(isinstance(sample, CleanSamples) for sample in trainer.loader.buffer.samples)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sd15", {"lora": False, "learning_rate": 1e-4, "beta": 0.1}),
        (
            "sd3",
            {"num_trained_steps": 2, "beta": 0.1, "num_generations": 2, "target_change": 0.1, "learning_rate": 1.0},
        ),
        ("flux", {"trained_steps": "all", "step_selection": "sample"}),
        ("wan", {"trained_steps": [1, 3], "step_selection": "prompt", "gradient_checkpointing": True}),
        ("wan_experts", {"num_trained_steps": 3, "num_inference_steps": 4}),
        ("modular_sd3", {"per_device_train_batch_size": 1}),
    ],
)
def test_kinds_of_runs(tmp_path, name, settings, caplog):
    trainer = trainer_for(tmp_path, name, rewards=blue, **(SHORT | {"eval_strategy": "steps"} | settings))
    assert train_and_compare(trainer)
    assert min(logged(trainer, "grad_norm")) > 0
    assert max(logged(trainer, "prediction/max_error")) < 1e-5  # those that enter alone have another batch
    assert ("kl" in trainer.state.log_history[-3]) == ("beta" in settings)
    changes = logged(trainer, "prediction/change")
    assert bool(changes) == ("target_change" in settings) and all(change > 0 for change in changes)
    if "beta" in settings:
        first, *later = logged(trainer, "kl") + logged(trainer, "eval_kl")
        assert first == 0 < min(later)  # the policy begins as the reference
    assert "will not be trained" not in caplog.text and "every gradient is 0" not in caplog.text
    assert not logged(trainer, "frac_reward_zero_std") and not logged(trainer, "spread/advantage_mean")


def test_checkpointed_activations_and_a_resumed_run_give_the_same_weights(tmp_path):
    own = SHORT | {
        "num_iterations": 2,
        "num_trained_steps": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    plain = trainer_for(tmp_path / "plain", rewards=blue, **own)
    plain.train()
    saving = trainer_for(tmp_path / "saving", rewards=blue, **own | {"gradient_checkpointing": True})
    assert saving.pipe.vae.decoder.gradient_checkpointing
    saving.train()
    resumed = trainer_for(tmp_path / "plain", rewards=blue, **own)
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-3"))
    weights = policy_weights(plain)
    for name, value in policy_weights(resumed).items():
        assert torch.equal(value, weights[name])
    for name, value in policy_weights(saving).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)


def test_a_run_whose_update_sees_something_else_stops(tmp_path):
    # Stable Diffusion 3 hardly moves in its last step, to a sigma of 0 from about 0.01
    trainer = trainer_for(tmp_path, rewards=blue, **SHORT, num_trained_steps=2)
    forward = trainer.pipe.transformer.forward

    def changed(*args, **kwargs):
        return tuple(x * (1.01 if torch.is_grad_enabled() else 1.0) for x in forward(*args, **kwargs))

    trainer.pipe.transformer.forward = changed
    with pytest.raises(RatioError, match="finished latents"):
        trainer.train()


def not_blue(images, **columns):
    return [1 - value for value in blue(as_tensor(images)[:, 0]).tolist()]


def test_a_run_that_hacks_stops_by_default(tmp_path):
    own = SHORT | {"max_steps": 20, "learning_rate": 5e-3, "eval_strategy": "steps", "eval_steps": 2}
    own |= {"eval_reward_funcs": not_blue, "save_strategy": "steps"}
    trainer = trainer_for(tmp_path / "guarded", rewards=blue, **own)
    assert trainer.args.stop_when == {"eval_rewards/not_blue/mean": 3}
    trainer.train()
    assert "not_blue" in trainer.run["stopped"] and 2 < trainer.state.global_step < 20
    assert trainer.args.load_best_model_at_end
    free = trainer_for(tmp_path / "free", rewards=blue, **own, stop_when={}).args
    assert free.stop_when == {} and not free.load_best_model_at_end
    several = own | {"eval_dataset": dict.fromkeys(("one", "two"), Dataset.from_dict({"prompt": ["a", "b"]}))}
    several = trainer_for(tmp_path / "several", rewards=blue, **several).args
    assert several.stop_when == {} and not several.load_best_model_at_end


def test_what_guards_a_run_is_what_its_evaluations_measure(tmp_path, caplog):
    prompts = Dataset.from_dict({"prompt": ["a", "b"]})
    alone, beside = (RunRewards(load_rewards(blue), [1.0], load_rewards(others)) for others in ([], not_blue))

    def guard(rewards, dataset, **settings):
        own = {"loss_type": "draft", "eval_strategy": "steps", "eval_steps": 2} | settings
        args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **own)
        guard_gradients(rewards, args, dataset)
        return args.stop_when

    alike = {"diversity": 0.4, "eval_diversity": 0.4}
    assert guard(beside, prompts, num_generations=2) == {"eval_rewards/not_blue/mean": 3}
    assert guard(alone, prompts, num_generations=2, num_generations_eval=2) == alike
    assert guard(beside, {"one": prompts, "two": prompts}, num_generations=2) == {"diversity": 0.4}
    assert guard(alone, None, eval_strategy="no", num_generations=2) == {"diversity": 0.4}
    assert "eval_reward_funcs" not in caplog.text
    assert guard(beside, prompts.select([0]), num_generations_eval=2) == {}  # without standard errors
    assert "eval_reward_funcs" in caplog.text


def test_what_cannot_be_differentiated_is_refused(tmp_path):
    pipe = tiny_pipelines.build("sdxl")[0]
    pipe.vae.half().register_to_config(force_upcast=True)  # decoding casts its weights to float32 and back
    with pytest.raises(ValueError, match="float16"):
        trainer_for(tmp_path, "sdxl", rewards=blue, model=pipe, **SHORT)
    with pytest.raises(ValueError, match="'brightness' has none"):  # before the model, which is nowhere, is looked for
        trainer_for(tmp_path, rewards=not_differentiable, model="nobody/nothing", **SHORT)
    with pytest.raises(ValueError, match="'blue' has none"):
        trainer_for(tmp_path, rewards={blue: {"threshold": 0.5}}, **SHORT)
    trainer_for(tmp_path, rewards=[not_differentiable, blue], reward_weights=[0.0, 1.0], **SHORT)
    for settings in (
        {"sde_type": "cps"},
        {"best_of_n": 2, "num_generations": 4},
        {"samples_per_latent": "group", "num_generations": 4},
        {"multi_objective_aggregation": "product_then_normalize"},
        {"drop_zero_advantages": True},
        {"trained_steps": [5, 11]},
    ):
        name = next(iter(settings))
        with pytest.raises(ValueError, match=name):
            DiffusionGRPOConfig(str(tmp_path), loss_type="draft", use_cpu=True, **settings)


def test_defaults(tmp_path):
    def steps(**settings):
        args = DiffusionGRPOConfig(str(tmp_path), loss_type="draft", use_cpu=True, **settings)
        return args.num_generations, args.trainable_steps, args.trained_count

    assert steps() == (1, range(9, 10), 1)
    own = DiffusionGRPOConfig(str(tmp_path), loss_type="draft", use_cpu=True)
    assert prepare_args("tiny", own).num_generations == 1  # other losses have the tiny model's own default
    assert steps(num_trained_steps=3, num_generations=4) == (4, range(7, 8), 1)
    assert steps(trained_steps="all")[1] == range(10) and steps(trained_steps=[2, 10])[1] == range(2, 10)
