"""The value model: what it sees, a case where the true value is known, and what a checkpoint keeps."""

import math
import shutil
from types import SimpleNamespace

import pytest
import ranks_server
import resumable_run
import tiny_pipelines
import torch
from safetensors.torch import load_file
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

from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.trajectory import Trajectory
from diffusion_grpo.rollout.value_model import (
    CONDITIONS,
    STATE_SIZE,
    STRETCHES,
    VALUE_WEIGHTS,
    ValueCallback,
    ValueModel,
    ValueTargets,
    pool_conditions,
    record_conditions,
    reduce_states,
)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_no_scale_of_the_reward_is_too_small_to_learn(scale):
    seen = torch.randn(64, 2, STATE_SIZE, generator=torch.Generator().manual_seed(0))
    reward = scale * seen[:, 0, 0]
    model = ValueModel(seed=0)
    model.calibrate(seen, reward)
    targets = ValueTargets(seen, model(seen).detach(), reward[:, None].expand(-1, 2))
    assert model.loss(targets, None).item() == pytest.approx(0.5, rel=1e-3)


def test_states_hold_latent_place_and_conditions():
    latents, conditions = torch.randn(3, 4, 2, 8, 8), torch.randn(3, CONDITIONS)
    zeros, steps = torch.zeros(3, 4), torch.tensor([[1, 2, 3, 5]] * 3)
    trajectory = Trajectory(latents, latents, zeros, steps, zeros[:, 0], zeros[:, 0], 10, 1.0)
    seen = reduce_states(trajectory, conditions)
    assert seen.shape == (3, 4, STATE_SIZE) and seen.dtype == torch.float32
    parts = latents.reshape(3, 4, STRETCHES, -1)
    torch.testing.assert_close(seen[..., :STRETCHES], parts.mean(-1))
    torch.testing.assert_close(seen[..., STRETCHES : 2 * STRETCHES], parts.square().mean(-1).sqrt())
    place = 2 * STRETCHES + CONDITIONS
    torch.testing.assert_close(seen[:, 2, 2 * STRETCHES : place], conditions)
    times = torch.tensor([0.1, 0.2, 0.3, 0.5])
    torch.testing.assert_close(seen[0, :, place], times)
    frequencies = torch.arange(1, STATE_SIZE - place)
    torch.testing.assert_close(seen[1, :, place + 1 :], torch.cos(math.pi * times[:, None] * frequencies))


@pytest.mark.parametrize("name", ["sd3", "sd15", "flux", "wan"])
def test_conditions_tell_prompts_apart_and_nothing_else(name):
    pipe, inputs = tiny_pipelines.build(name)
    policy, prompts = DenoisingPolicy(pipe), ["a cat", "a dog", "a cat"]
    inputs = inputs | {"prompt": prompts}
    inputs.pop("negative_prompt", None)
    with record_conditions(policy) as found:
        rollout(policy, inputs, seeds=[0, 1, 2], num_inference_steps=3)
        rollout(policy, inputs | {"prompt": prompts[1:]}, seeds=[7, 8], num_inference_steps=3)
    assert [part.shape for part in found] == [(3, CONDITIONS), (2, CONDITIONS)]
    assert torch.equal(found[0][0], found[0][2]) and not torch.allclose(found[0][0], found[0][1], atol=0.1)
    torch.testing.assert_close(found[1], found[0][1:], rtol=1e-4, atol=1e-4)
    assert not any(network._forward_pre_hooks for network in policy.networks)


def test_conditions_of_a_call_are_those_with_a_row_for_each_latent():
    latents, text, ids = torch.randn(4, 8, 8), torch.randn(4, 5, 6), torch.randn(8, 3)
    both = pool_conditions((latents,), {"text": text, "ids": ids, "timestep": torch.ones(4)}, 2)
    alone = pool_conditions((latents,), {"text": text}, 2)
    assert torch.equal(both, alone) and both.abs().max() > 0
    assert not torch.equal(pool_conditions((latents,), {"text": text, "pooled": text[:, 0]}, 2), alone)
    assert pool_conditions(([torch.randn(3, 8), torch.randn(3, 8)],), {}, 2).eq(0).all()


# in training


GAE = {"advantage_estimator": "gae"}


def test_a_known_value_is_learned_beside_a_fixed_policy(tmp_path):
    """Each prompt has one reward, so that is the value of all its states; the policy's learning rate is 0."""

    def by_prompt(prompts, **columns):
        return [float(len(prompt)) for prompt in prompts]

    settings = {"num_inference_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    settings |= {"num_iterations": 2, "max_steps": 31, "learning_rate": 0.0}
    trainer = trainer_for(
        tmp_path, rewards=by_prompt, **settings, **GAE, value_learning_rate=5e-3, value_clip=None, gae_lambda=1.0
    )
    trainer.train_dataset = trainer.train_dataset.select([0, 3])  # "a red cat", "the sea at night"
    trainer.train()
    rewards = torch.tensor([float(len(row["prompt"])) for row in trainer.loader.buffer.rows])
    values = trainer.loader.buffer.advantages.targets.values[:, 0]
    assert rewards.std() > 1 and (values - rewards).square().mean().sqrt() < 0.7  # before it saw this rollout
    explained = logged(trainer, "value/explained_variance")
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > 0.9
    assert max(logged(trainer, "ratio/max_error")) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": False, "kl_reward": 0.1},
        {"num_generations": 1, "num_trained_steps": 2, "step_selection": "sample", "num_inference_steps": 4},
        {"name": "wan", "importance_sampling_level": "sequence", "num_iterations": 2},
    ],
    ids=str,
)
def test_training_with_a_value_model(tmp_path, settings):
    rewards = first_frame_brightness if settings.get("name") == "wan" else brightness
    trainer = trainer_for(tmp_path, rewards=rewards, **settings, **GAE)
    values = {name: value.clone() for name, value in trainer.learner.values.state_dict().items()}
    assert train_and_compare(trainer)
    # samples that train on other steps are replayed in other batches, which float32 sees
    assert max(logged(trainer, "ratio/max_error")) <= (1e-6 if "step_selection" in settings else 0.0)
    assert any(not torch.equal(values[name], value) for name, value in trainer.learner.values.state_dict().items())
    assert len(logged(trainer, "value/loss")) == 2
    assert all(parameter.grad is None for parameter in trainer.learner.values.parameters())


def test_gradients_of_policy_and_value_model_are_those_of_their_objectives(tmp_path):
    """Of the second update on a rollout, against autograd on what both minimise, written out for all samples."""
    settings = GAE | {"num_iterations": 2, "max_steps": 2, "max_grad_norm": 0, "epsilon": 1.0, "gae_lambda": 0.5}
    trainer = trainer_for(tmp_path, **settings, value_learning_rate=0.05, num_inference_steps=4)
    compared = []

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            buffer, policy, values = trainer.loader.buffer, torch.zeros(()), torch.zeros(())
            trajectory = joined_trajectory(trainer)
            assert buffer.advantages.values.std(1).min() > 1e-3  # each step has its own
            for rows in (slice(0, 4), slice(4, 8)):
                values = values + trainer.learner.values.loss(buffer.advantages.targets[rows], args.value_clip) / 2
                for column, step in enumerate((0, 1, 2)):
                    now = replay(trainer.policy, trainer.inputs(buffer.rows[rows]), trajectory[rows], step)
                    ratio = torch.exp(now.log_prob - trajectory.log_probs[rows, column])
                    policy = policy - (ratio * buffer.advantages.values[rows, column]).sum() / (8 * 3)
            for objective, part in ((policy, model), (values, trainer.learner.values)):
                parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
                for parameter, gradient in zip(parameters, torch.autograd.grad(objective, parameters), strict=True):
                    torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-7)
            compared.append(state.global_step)

    trainer.callback_handler.callbacks.insert(0, Compare())  # before the value model's own
    trainer.train()
    assert compared == [0, 1]


def test_a_resumed_run_has_the_same_value_model(tmp_path):
    settings = GAE | {"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "ema_decay": 0.9}
    # within a rollout, and between two
    whole, *resumed = assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 1, 2)
    expected, saved = whole.learner.values.state_dict(), load_file(tmp_path / "whole" / "checkpoint-4" / VALUE_WEIGHTS)
    for found in (saved, *(again.learner.values.state_dict() for again in resumed)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    whole.save_model()
    assert not (tmp_path / "whole" / VALUE_WEIGHTS).exists()  # what is published is the policy alone
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "without")
    (tmp_path / "without" / VALUE_WEIGHTS).unlink()
    with pytest.raises(ValueError, match="value_model.safetensors"):
        whole.learner.values.load(tmp_path / "without")


def test_gradients_are_averaged_over_processes_and_cleared():
    """Also at the start, where an attempt that ran out of memory left some."""
    model = ValueModel()
    model.loss(ValueTargets(torch.randn(2, 3, STATE_SIZE), torch.zeros(2, 3), torch.ones(2, 3)), None).backward()
    own, used = [parameter.grad.clone() for parameter in model.parameters()], []
    model.optimizer.register_step_pre_hook(lambda *_: used.extend(p.grad for p in model.parameters()))
    callback = ValueCallback(
        model, SimpleNamespace(reduce=lambda gradient, reduction: {"mean": gradient / 2}[reduction])
    )
    for begin in (callback.on_pre_optimizer_step, callback.on_train_begin):
        begin(None, None, None)
        assert all(parameter.grad is None for parameter in model.parameters())
        model.loss(ValueTargets(torch.randn(2, 3, STATE_SIZE), torch.zeros(2, 3), torch.ones(2, 3)), None).backward()
    assert all(torch.equal(mean, gradient / 2) for mean, gradient in zip(used, own, strict=True))


@pytest.mark.distributed
def test_two_processes_train_what_one_does(tmp_path):
    settings = GAE | {"kl_reward": 0.1, "save_strategy": "steps", "save_steps": 2}
    for processes, name in ((1, "one"), (2, "two")):
        own = settings | {"gradient_accumulation_steps": 2 // processes}
        ranks_server.succeed(tmp_path / f"{name}-output", processes, resumable_run.run, tmp_path / name, own)
    for file, tolerance in (("adapter_model.safetensors", 1e-6), (VALUE_WEIGHTS, 1e-5)):
        one, two = (load_file(tmp_path / name / "checkpoint-2" / file) for name in ("one", "two"))
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, rtol=0, atol=tolerance)


def test_the_first_weights_depend_on_the_seed_alone():
    before = torch.random.get_rng_state()
    one, same, other = ValueModel(seed=1), ValueModel(seed=1), ValueModel(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.layers[0].weight, same.layers[0].weight)
    assert not torch.equal(one.layers[0].weight, other.layers[0].weight)
