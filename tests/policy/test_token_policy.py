"""A pipeline that only writes tokens trains too: a second family, with a language model, a colour a token, and no DiT.

Its texts end where the model says so, so that samples have different lengths.
"""

import logging

import pytest
import tiny_pipelines
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image
from tiny_pipelines.glm import tokenizer as byte_tokenizer
from tiny_runs import SETTINGS, brightness, logged, trained_weights
from transformers import LlamaConfig, LlamaForCausalLM

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.pipelines import FAMILIES, Family
from diffusion_grpo.policy.language_model import draw, recomputing, score
from diffusion_grpo.policy.rollout import DenoisingPolicy, TokenPolicy, UnsupportedPipeline, replay, rollout
from diffusion_grpo.policy.token import policy_for
from diffusion_grpo.policy.token_process import Sampling
from diffusion_grpo.rollout.buffer import MicroBatch, Recorded

COLORS, END, LENGTH = 16, 15, 6
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
INPUTS = {"prompt": ["a cat", "a long-haired dog"]}


class Painter(DiffusionPipeline):
    """A row of grey squares, one a token; black after the end."""

    def __init__(self, tokenizer, writer):
        super().__init__()
        self.register_modules(tokenizer=tokenizer, writer=writer)

    @torch.no_grad()
    def __call__(self, prompt, generator=None, output_type="pil"):
        call = self.tokenizer(prompt, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = self.writer.generate(**call, max_new_tokens=LENGTH, do_sample=True)[:, call["input_ids"].shape[1] :]
        squares = torch.nn.functional.pad(ids, (0, LENGTH - ids.shape[1]), value=END)
        return ([Image.fromarray((row * 16 % 240).byte().numpy()[None]) for row in squares],)


class PainterFamily(Family):
    language_model = "writer"

    def vocabulary(self, pipe):
        return COLORS


@pytest.fixture
def painter(monkeypatch):
    monkeypatch.setitem(FAMILIES, "Painter", PainterFamily())
    return make_painter()


def make_painter():
    ids = byte_tokenizer()
    torch.manual_seed(0)
    writer = LlamaForCausalLM(LlamaConfig(vocab_size=len(ids), **LLAMA)).eval()
    tiny_pipelines.randomize(writer)
    writer.generation_config.update(eos_token_id=END, pad_token_id=ids.pad_token_id, top_k=0)
    return Painter(ids, writer)


def call_of(pipe, prompts):
    """What a pipeline hands to `generate`."""
    return {**pipe.tokenizer(prompts, return_tensors="pt", padding=True), "max_new_tokens": LENGTH, "do_sample": True}


def drawn_by(pipe, prompts, seeds):
    settings = dict(count=LENGTH, vocabulary=COLORS, sampling=Sampling(top_p=0.9), seeds=torch.tensor(seeds))
    return draw(pipe.writer, call_of(pipe, prompts), **settings)


def test_what_a_sample_gets_depends_on_its_seed_alone(painter):
    both = drawn_by(painter, INPUTS["prompt"], [3, 4])
    for row, seed in enumerate([3, 4]):
        alone = drawn_by(painter, INPUTS["prompt"][row : row + 1], [seed])
        length = int(alone.mask.sum())
        assert torch.equal(alone.ids[0, :length], both.ids[row, :length])
    other = drawn_by(painter, INPUTS["prompt"], [3, 5])
    assert torch.equal(other.ids[0][other.mask[0]], both.ids[0][both.mask[0]])
    assert not torch.equal(other.ids[1], both.ids[1])


def test_texts_end_and_what_follows_does_not_count(painter):
    many = drawn_by(painter, ["a cat"] * 64, list(range(64)))
    lengths = many.mask.sum(1)
    assert 1 <= lengths.min() < LENGTH == lengths.max()
    for ids, length in zip(many.ids.tolist(), lengths.tolist(), strict=True):
        assert END not in ids[: length - 1] and (ids[length - 1] == END or length == LENGTH)
        assert all(token < COLORS for token in ids[:length])


def test_teacher_forcing_says_what_the_generation_said(painter):
    """Left padding, positions and the end of a text included."""
    made = drawn_by(painter, INPUTS["prompt"] * 8, list(range(16)))
    prompt = {name: value for name, value in call_of(painter, INPUTS["prompt"] * 8).items() if torch.is_tensor(value)}
    prompt.pop("token_type_ids", None)
    arguments = PainterFamily().scoring(painter.writer, prompt, made.ids)
    with torch.no_grad():
        scored = score(
            painter.writer.forward, arguments, made.ids, made.mask, made.kept, vocabulary=COLORS, temperature=1.0
        )
    assert (scored - made.log_probs)[made.mask].abs().max() < 1e-5
    assert (scored[~made.mask] == 0).all() and (scored[made.mask] < 0).any()


def test_the_first_ratio_is_one_and_masked_tokens_give_no_gradient(painter):
    policy = TokenPolicy(painter, "writer", sampling={"top_p": 0.9})
    _, trajectory = rollout(policy, INPUTS, seeds=[0, 3], num_inference_steps=2)
    assert len(set(trajectory.mask.sum(1).tolist())) == 2
    painter.writer.requires_grad_(True)
    length = trajectory.ids.shape[1]
    for more in (0, 3):  # beside a longer one of another batch
        now = replay(policy, INPUTS, trajectory._padded(more), 0)
        assert now.log_prob.shape == now.mask.shape == (2, length + more)
        assert torch.equal(now.log_prob.detach()[:, :length], trajectory.log_probs[:, 0])
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


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def trainer_of(pipe, folder, peft_config=LORA, rewards=brightness, **settings):
    """A trainer of the painter, two updates."""
    args = DiffusionGRPOConfig(output_dir=str(folder), **SETTINGS | {"train_component": "writer", **settings})
    rows = Dataset.from_dict({"prompt": ["a cat", "a long-haired dog"]})
    return DiffusionGRPOTrainer(pipe, rewards, args, rows, eval_dataset=rows, peft_config=peft_config)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_trains(painter, tmp_path, level):
    settings = {"num_iterations": 2, "beta": 0.1, "epsilon": 0.2, "importance_sampling_level": level}
    trainer = trainer_of(painter, tmp_path, eval_strategy="steps", eval_steps=2, **settings)
    before = trained_weights(trainer)
    trainer.train()
    after = trained_weights(trainer)
    assert logged(trainer, "ratio/max_error") == [0.0]
    assert all(not torch.equal(after[name], before[name]) for name in before)
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
    plain = {"noise_level": 0.7, "sde_window": [0, 2], "permute_steps": True, "sde_type": "cps", "kl_reward": 0.1}
    plain |= {"noise_in_last_step": True, "log_prob_type": "squared_error"}
    for setting in ({name: value} for name, value in plain.items()):
        with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* is of denoising steps"):
            trainer_of(painter, tmp_path, **setting)


@pytest.mark.parametrize("epsilon", [None, 0.2])
def test_the_clip_range_of_denoising_steps_is_warned_of(painter, tmp_path, caplog, epsilon):
    given = {} if epsilon is None else {"epsilon": epsilon}
    with caplog.at_level(logging.WARNING, "diffusion_grpo"):
        trainer_of(painter, tmp_path, **given)
    assert ("epsilon=0.0001 is a clip range of denoising steps" in caplog.text) == (epsilon is None)


def test_settings_of_tokens_are_refused_where_there_are_none():
    pipe, _ = tiny_pipelines.build("sd3")
    with pytest.raises(ValueError, match="draws no tokens; leave out temperature, top_p"):
        DenoisingPolicy(pipe, sampling={"temperature": 1.0, "top_p": 0.5, "top_k": None})


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_settings_out_of_range_are_refused(setting, tmp_path):
    with pytest.raises(ValueError, match=next(iter(setting))):
        DiffusionGRPOConfig(str(tmp_path), **SETTINGS | setting)


def test_settings_reach_the_drawing(painter, tmp_path):
    trainer = trainer_of(painter, tmp_path, temperature=0.5, top_k=3, top_p=0.8)
    assert trainer.policy.sampling == Sampling(0.5, 3, 0.8)
    assert trainer_of(painter, tmp_path / "own").policy.sampling == Sampling(1.0, 0, 1.0)


def test_a_language_model_that_nobody_knows_is_refused(painter, tmp_path, monkeypatch):
    monkeypatch.delitem(FAMILIES, "Painter")
    with pytest.raises(UnsupportedPipeline, match="Painter's writer is a language model.*add a family"):
        policy_for(painter, "writer", DiffusionGRPOConfig(str(tmp_path), **SETTINGS), None, False)


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
    recorded = Recorded([trajectory[[row]] for row in range(2)])
    batch = MicroBatch([{"prompt": prompt} for prompt in INPUTS["prompt"]], recorded, advantages, old)
    if level == "sequence":
        batch.log_ratio = trainer._sequence_log_ratio(batch)
    parameters = [parameter for parameter in painter.writer.parameters() if parameter.requires_grad]
    loss, _ = trainer._step_loss(batch.part([0, 1]), 0, is_on_policy=False)

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
