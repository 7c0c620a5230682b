"""A pipeline that only writes tokens trains too: the ratio is 1, masks hold, and settings reach the drawing."""

import dataclasses

import pytest
import torch
from painter import INPUTS, LENGTH, Painter, make_painter, trainer_of
from tiny_runs import logged, train_and_compare, trained_weights
from torch.nn.functional import pad

from diffusion_grpo.algorithms.batch import MicroBatch
from diffusion_grpo.pipelines import FAMILIES
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.language_model import recomputing
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.token import TokenPolicy, make_policy
from diffusion_grpo.policy.token_process import Sampling, TokenTrajectory


def padded(trajectory, more):
    """The trajectory as it is kept beside one of another batch that is longer by `more` tokens."""
    by_token = {name: pad(getattr(trajectory, name), (0, more)) for name in ("ids", "mask", "drift", "log_probs")}
    longer = dataclasses.replace(trajectory, **by_token, support=pad(trajectory.support, (0, 0, 0, more)))
    return TokenTrajectory.align([trajectory, longer])[0]


def test_the_first_ratio_is_one_and_masked_tokens_give_no_gradient(painter):
    policy = TokenPolicy(painter, "writer", sampling={"top_p": 0.9})
    _, trajectory = rollout(policy, INPUTS, seeds=[0, 3], num_inference_steps=2)
    assert len(set(trajectory.mask.sum(1).tolist())) == 2
    painter.writer.requires_grad_(True)
    length = trajectory.ids.shape[1]
    for more in (0, 3):  # beside a longer one of another batch
        now = replay(policy, INPUTS, padded(trajectory, more), 0)
        assert now.log_prob.shape == now.mask.shape == (2, length + more)
        assert torch.equal(now.log_prob.detach()[:, :length], trajectory.log_probs[:, 0])
        assert (now.log_prob[~now.mask] == 0).all() and (now.log_prob[now.mask] < 0).any()
        gradients = torch.autograd.grad(now.log_prob.sum(), list(painter.writer.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients) and any(g.abs().max() > 0 for g in gradients)


def test_the_pipeline_is_left_as_it_was(painter):
    before = dict(painter.__dict__), dict(painter.writer.__dict__)
    policy = TokenPolicy(painter, "writer")
    _, trajectory = rollout(policy, INPUTS, seeds=[0, 1], num_inference_steps=2)
    replay(policy, INPUTS, trajectory, 0)
    assert (dict(painter.__dict__), dict(painter.writer.__dict__)) == before
    assert rollout(policy, INPUTS, seeds=[0, 1], num_inference_steps=2, noise_level=0.0)[1] is None


def test_checkpointed_layers_recompute_and_give_the_same_gradient(painter):
    policy = TokenPolicy(painter, "writer")
    _, trajectory = rollout(policy, INPUTS, seeds=[0, 1], num_inference_steps=2)
    painter.writer.requires_grad_(True)
    gradients, calls = [], []
    layer = painter.writer.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    for is_checkpointed in (False, True):
        if is_checkpointed:
            painter.writer.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        now = replay(policy, INPUTS, trajectory, 0)
        assert torch.equal(now.log_prob.detach(), trajectory.log_probs[:, 0])
        gradients.append(torch.autograd.grad(now.log_prob.sum(), list(painter.writer.parameters())))
    assert len(calls) == 3  # once, and twice with recomputation
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    with recomputing(painter.writer):
        assert painter.writer.model.layers[0].training and not layer.training
    assert not any(module.training for module in painter.writer.modules())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_share_of_the_layers_is_checkpointed(painter, tmp_path, share):
    trainer_of(painter, tmp_path, gradient_checkpointing=True, selective_checkpointing=share)
    assert [layer.gradient_checkpointing for layer in painter.writer.model.layers] == [True, share == 1.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_trains(painter, tmp_path, level):
    settings = {"num_iterations": 2, "beta": 0.1, "epsilon": 0.2, "importance_sampling_level": level}
    trainer = trainer_of(painter, tmp_path, eval_strategy="steps", eval_steps=2, **settings)
    assert train_and_compare(trainer) == trained_weights(trainer).keys()
    assert logged(trainer, "ratio/max_error") == [0.0]
    assert logged(trainer, "kl")[0] == 0.0 < logged(trainer, "kl")[1]
    assert len(logged(trainer, "eval_reward")) == 1
    assert 1 < logged(trainer, "completions/mean_length")[0] < LENGTH
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-5


def test_the_ratio_may_be_anchored_by_a_replay(painter, tmp_path):
    """Rolled out in other batches than are trained, from other paddings; then the first ratio is 1 by construction."""
    settings = {"old_log_prob": "replay", "rollout_batch_size": 8, "num_iterations": 2, "best_of_n": 2}
    trainer = trainer_of(painter, tmp_path, **settings)
    trainer.train()
    assert logged(trainer, "ratio/mean")[0] == 1.0 != logged(trainer, "ratio/mean")[1]
    assert logged(trainer, "ratio/max_error")[0] < 1e-5


def test_settings_of_denoising_steps_are_refused(painter, tmp_path):
    plain = {"noise_level": 0.7, "trained_steps": [0, 2], "step_selection": "sample", "sde_type": "cps"}
    plain |= {"kl_reward": 0.1, "noisy_steps": "all_and_last", "log_prob_type": "squared_error"}
    plain |= {"step_weight": "noise", "loss_type": "dppo"}
    for setting in ({name: value} for name, value in plain.items()):
        with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* is for denoising steps"):
            trainer_of(make_painter(), tmp_path, **setting)


def test_settings_reach_the_drawing(painter, tmp_path):
    trainer = trainer_of(painter, tmp_path, temperature=0.5, top_k=3, top_p=0.8)
    assert trainer.policy.sampling == Sampling(0.5, 3, 0.8)
    assert trainer_of(make_painter(), tmp_path / "own").policy.sampling == Sampling(1.0, 0, 1.0)


def test_a_language_model_that_nobody_knows_is_refused(painter, monkeypatch):
    monkeypatch.delitem(FAMILIES, "Painter")
    with pytest.raises(UnsupportedPipeline, match="Painter's writer is a language model.*add a family"):
        make_policy(painter, "writer")


def test_a_call_without_tokens_is_refused(painter, monkeypatch):
    monkeypatch.setattr(Painter, "__call__", lambda self, prompt, generator=None, output_type="pil": ([],))
    with pytest.raises(UnsupportedPipeline, match="asked its writer for tokens 0 times in one call"):
        rollout(TokenPolicy(painter, "writer"), INPUTS, seeds=[0, 1], num_inference_steps=2)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_level_of_the_ratio(painter, tmp_path, level):
    """Off policy, against the objectives written out: a ratio a token, or GSPO's one of the whole text."""
    trainer = trainer_of(painter, tmp_path, importance_sampling_level=level, epsilon=0.1, num_iterations=2)
    _, trajectory = rollout(trainer.policy, INPUTS, seeds=[0, 3], num_inference_steps=2)
    torch.manual_seed(0)
    advantages, old = torch.tensor([1.0, -0.5]), trajectory.log_probs + 0.3 * torch.randn(2, 1, LENGTH)
    batch = MicroBatch(
        [{"prompt": prompt} for prompt in INPUTS["prompt"]],
        [trajectory[[row]] for row in range(2)],
        [[0, 1]],
        advantages,
        old,
        trainer.inputs,
        is_on_policy=False,
    )
    if level == "sequence":
        batch.log_ratio = trainer.learner.run_passes(trainer.passes.sequence_log_ratio, batch)
    parameters = [parameter for parameter in painter.writer.parameters() if parameter.requires_grad]
    loss = trainer.learner.algorithm.loss(trainer.policy, trainer.learner.reference, batch.parts[0], 0).loss

    log_ratio = replay(trainer.policy, INPUTS, trajectory, 0).log_prob - old[:, 0]
    count = trajectory.mask.sum(1)
    if level == "sequence":
        log_ratio = ((log_ratio * trajectory.mask).sum(1) / count)[:, None].expand(-1, LENGTH)
    ratio, advantages = log_ratio.exp(), advantages[:, None]
    objective = torch.minimum(advantages * ratio, advantages * ratio.clamp(0.9, 1.1)) * trajectory.mask
    expected = -(objective.sum(1) / count).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = [torch.autograd.grad(value, parameters) for value in (loss, expected)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
