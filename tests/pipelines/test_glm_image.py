"""GLM-Image, either part of it: the DiT by its denoising steps, the language model by the tokens it writes."""

import numpy as np
import pytest
import tiny_pipelines
import torch
from datasets import Dataset, Features, Image, Value
from diffusers import DiffusionPipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from peft import LoraConfig, PeftModel
from tiny_pipelines.conditioned import draw_images
from tiny_runs import LORA, SETTINGS, assert_resumes, brightness, logged, train_and_compare, trained_weights

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.pipelines import FAMILIES, family_of
from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout
from diffusion_grpo.policy.token import TokenPolicy
from diffusion_grpo.policy.token_process import Sampling
from diffusion_grpo.weights.files import LORA_WEIGHTS

DIT, WRITER = "transformer", "vision_language_encoder"
BOTH = [DIT, WRITER]
KINDS = ["glm_image", "glm_image_edit"]
LORAS = {DIT: LORA, WRITER: {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
PROMPTS = ['a poster that says "OPEN"', "a cat"]


def rows(kind):
    """Prompts, and for image-to-image one image each, as a dataset on disk has them."""
    columns = {"prompt": PROMPTS}
    if kind == "glm_image":
        return Dataset.from_dict(columns)
    features = Features({"prompt": Value("string"), "image": Image()})
    return Dataset.from_dict({**columns, "image": draw_images(size=32)}, features=features)


def trainer_of(folder, component, kind="glm_image", lora=True, pipe=None, **settings):
    """A trainer of the tiny pipeline; groups of two, two updates of two micro-batches."""
    pipe = pipe or tiny_pipelines.build(kind)[0]
    few = {"num_generations": 2, "per_device_train_batch_size": 2, "num_inference_steps": 3, "height": 64, "width": 64}
    args = DiffusionGRPOConfig(output_dir=str(folder), **{**SETTINGS, **few, "train_component": component, **settings})
    peft_config = LoraConfig(**LORAS[component]) if lora else None
    return DiffusionGRPOTrainer(pipe, brightness, args, rows(kind), eval_dataset=rows(kind), peft_config=peft_config)


def changed(before, after):
    """Names of the weights that differ."""
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("component", BOTH)
def test_it_trains_with_a_first_ratio_of_one(tmp_path, component, kind):
    settings = {"num_iterations": 2, "beta": 0.1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(tmp_path, component, kind, **settings)
    assert train_and_compare(trainer) == trained_weights(trainer).keys()
    assert logged(trainer, "ratio/max_error") == [0.0]
    first, second = logged(trainer, "kl")
    assert first == 0.0 < second
    assert logged(trainer, "ratio/mean")[1] != 1.0 and len(logged(trainer, "eval_reward")) == 1
    drift = logged(trainer, "sampling/sampling_logp_difference/max")
    assert drift == [] if component == DIT else 0 < drift[0] < 1e-4


@pytest.mark.parametrize(("component", "kind"), list(zip(BOTH, reversed(KINDS), strict=True)))
def test_recomputed_activations_give_the_same_weights(tmp_path, component, kind):
    """Image-to-image too, where the DiT's key-value caches are in another mode by the time of the backward pass."""
    trainers = [
        trainer_of(tmp_path / str(saves), component, kind, gradient_checkpointing=saves, max_steps=1)
        for saves in (False, True)
    ]
    calls = []
    for trainer in trainers:
        layers = trainer.pipe.transformer.transformer_blocks[0].ff, _language(trainer.pipe).layers[0].mlp
        layer = layers[BOTH.index(component)]
        layer.register_forward_pre_hook(lambda *args: calls.append(None) if torch.is_grad_enabled() else None)
        trainer.train()
        calls.append("end")
    plain, recomputed = "".join("." if call is None else call for call in calls).split("end")[:2]
    assert len(recomputed) == 2 * len(plain) > 0
    one, other = map(trained_weights, trainers)
    assert not changed(one, other)


@pytest.mark.parametrize("component", BOTH)
def test_it_trains_in_mixed_precision(tmp_path, component):
    trainer = trainer_of(tmp_path, component, "glm_image_edit", bf16=True, beta=0.1, num_iterations=2)
    assert train_and_compare(trainer) == trained_weights(trainer).keys()
    assert logged(trainer, "ratio/max_error")[0] <= 1e-5 and logged(trainer, "kl")[0] <= 1e-6


def _language(pipe):
    return pipe.vision_language_encoder.model.language_model


@pytest.mark.parametrize(("component", "kind"), list(zip(BOTH, reversed(KINDS), strict=True)))
def test_resume_within_a_rollout(tmp_path, component, kind):
    settings = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    whole, again = assert_resumes(lambda folder: trainer_of(folder, component, kind, **settings), tmp_path, 1)
    assert (tmp_path / "whole" / "checkpoint-1" / "rollout-rank0.safetensors").is_file()
    assert again.state.global_step == 2 and logged(again, "reward") == logged(whole, "reward")


@pytest.mark.parametrize("component", BOTH)
def test_a_lora_reloads_as_the_card_says(tmp_path, component):
    trainer = trainer_of(tmp_path / "run", component, learning_rate=0.02)
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    assert trainer.run["loads_by"] == ("load_lora_adapter" if component == DIT else "peft")
    plain, inputs = tiny_pipelines.build("glm_image")
    untrained = sample(plain, inputs)
    if component == DIT:
        assert f'pipe.transformer.load_lora_adapter("run", prefix=None, weight_name="{LORA_WEIGHTS}")' in card
        plain.transformer.load_lora_adapter(tmp_path / "run", prefix=None, weight_name=LORA_WEIGHTS)
    else:
        assert 'PeftModel.from_pretrained(pipe.vision_language_encoder, "run")' in card
        assert not (tmp_path / "run" / LORA_WEIGHTS).exists()
        PeftModel.from_pretrained(plain.vision_language_encoder, tmp_path / "run")
    loaded = sample(plain, inputs)
    assert np.array_equal(loaded, sample(trainer.pipe, inputs)) and not np.array_equal(loaded, untrained)


def sample(pipe, inputs):
    """What a pipeline makes by itself, as numbers."""
    pipe.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    with tiny_pipelines.on_equal_terms(pipe):
        return pipe(**inputs, **settings).images


@pytest.mark.parametrize("component", BOTH)
def test_full_training_leaves_out_what_gets_no_gradient_and_reloads(tmp_path, component):
    settings = {"lora": False, "beta": 0.1, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, component, **settings)
    names = set(trained_weights(trainer))
    assert not any("visual" in name or "vqmodel" in name for name in names)
    unmoved = names - train_and_compare(trainer)
    trainer.save_model()
    assert unmoved <= {"transformer_blocks.1.ff.net.2.bias"} | {name for name in names if "context" in name}
    assert logged(trainer, "ratio/max_error") == [0.0] and logged(trainer, "kl")[1] > 0
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    weights = dict(getattr(loaded, component).named_parameters())
    assert not changed(trained_weights(trainer), weights)
    again = trainer_of(tmp_path / "again", component, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not changed(trained_weights(trainer), trained_weights(again))


def test_a_lora_on_every_layer_leaves_the_vision_tower_out(tmp_path, monkeypatch):
    monkeypatch.setitem(LORAS, WRITER, {"r": 2, "target_modules": "all-linear"})
    names = trained_weights(trainer_of(tmp_path, WRITER))
    assert names and all("language_model" in name for name in names)


def test_prior_tokens_are_drawn_once_and_kept(tmp_path):
    """No replay asks the language model again, and what a sample is drawn from depends on its seed alone."""
    pipe, inputs = tiny_pipelines.build("glm_image")
    calls = []
    pipe.vision_language_encoder.register_forward_pre_hook(lambda *args: calls.append(None))
    policy = DenoisingPolicy(pipe)
    _, both = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=3)
    drawn = len(calls)
    assert both.tokens.shape == (2, 5) and drawn == 5
    replay(policy, inputs, both, 1)
    assert len(calls) == drawn
    alone = {**inputs, "prompt": inputs["prompt"][1:]}
    _, one = rollout(policy, alone, seeds=[2], num_inference_steps=3)
    assert torch.equal(one.tokens, both.tokens[1:])
    kept = replay(policy, inputs, both, 1).log_prob
    both.tokens = both.tokens.roll(1, dims=0)
    assert (replay(policy, inputs, both, 1).log_prob - kept).abs().min() > 1e-6  # they matter


def test_same_initial_noise_shares_the_prior_tokens_of_the_dit_only():
    pipe, inputs = tiny_pipelines.build("glm_image")
    one_prompt = {**inputs, "prompt": ["a cat", "a cat"]}
    settings = dict(seeds=[1, 2], initial_seeds=[7, 7], num_inference_steps=3)
    _, of_dit = rollout(DenoisingPolicy(pipe), one_prompt, **settings)
    assert torch.equal(of_dit.tokens[0], of_dit.tokens[1])
    images, of_writer = rollout(TokenPolicy(pipe, WRITER), one_prompt, **settings)
    assert not torch.equal(of_writer.ids[0], of_writer.ids[1])
    again, _ = rollout(TokenPolicy(pipe, WRITER), one_prompt, **settings)
    assert all(np.array_equal(one, other) for one, other in zip(images, again, strict=True))  # the decoder is fixed


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_generation(kind):
    """Positions on the grids, images in the prompt and left padding: teacher forcing agrees with the generation."""
    pipe, inputs = tiny_pipelines.build(kind)
    _, trajectory = rollout(TokenPolicy(pipe, WRITER), inputs, seeds=[1, 2], num_inference_steps=2)
    assert trajectory.drift.abs().max() < 1e-5 and trajectory.mask.all()
    assert trajectory.log_probs.shape == (2, 1, 5 if kind == "glm_image" else 4)
    assert (trajectory.ids < pipe.transformer.config.prior_vq_quantizer_codebook_size).all()


def test_tokens_are_drawn_from_what_a_plain_call_draws_from():
    """Temperature, top-k and top-p in one: at the first token the scores of transformers' own `generate` are ours."""
    pipe, inputs = tiny_pipelines.build("glm_image")
    model, seen = pipe.vision_language_encoder, []
    real = type(model).generate

    def generate(self, **call):
        plain = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
        output = real(self, **call, **plain)
        seen.append((output.logits[0], output.scores[0]))
        return output.sequences

    model.__dict__["generate"] = generate.__get__(model)
    torch.manual_seed(0)
    pipe(**inputs, num_inference_steps=1, output_type="latent", generator=torch.Generator().manual_seed(0))
    (logits, scores), sampling = seen[0], Sampling.of(model.generation_config)
    filtered = sampling.filter(logits)
    assert torch.equal(filtered, scores) and (filtered > -torch.inf).sum() < 2 * sampling.top_k


def test_ids_that_are_no_visual_tokens_are_never_drawn():
    """The end of the image in the middle of it, which the pipeline itself would fail on."""
    pipe, inputs = tiny_pipelines.build("glm_image")
    head = pipe.vision_language_encoder.lm_head
    with torch.no_grad():
        head.weight[64:] = 100 * head.weight[64:].sign()
    images, trajectory = rollout(TokenPolicy(pipe, WRITER), inputs, seeds=[1, 2], num_inference_steps=1)
    assert len(images) == 2 and (trajectory.ids < 64).all() and (trajectory.log_probs > -20).all()


def test_inputs_that_cannot_work_are_refused():
    pipe, inputs = tiny_pipelines.build("glm_image_edit")
    family = family_of(pipe)
    assert family is FAMILIES["GlmImagePipeline"]
    small, large = draw_images(size=32)[0], draw_images(size=64)[0]
    with pytest.raises(ValueError, match="no default size; set height"):
        family.arguments(pipe, {"prompt": ["a"], "width": 64})
    with pytest.raises(ValueError, match=r"sizes \(32, 32\), \(64, 64\) in one call"):
        family.arguments(pipe, {**inputs, "image": [small, large]})
    assert family.arguments(pipe, {**inputs, "image": [small, small]})["image"] == [[small], [small]]
    assert family.arguments(pipe, {**inputs, "image": [[small, small]]})["image"] == [[small, small]]


def test_a_call_that_is_computed_again_finds_the_cache_as_it_was():
    caches = GlmImageKVCache(num_layers=1)
    caches.set_mode("write")
    call, must_run = FAMILIES["GlmImagePipeline"].network_call({"kv_caches": caches})
    layer, key = call["kv_caches"][0], torch.ones(1, 2, 1, 1)
    assert must_run and layer.mode == "write"
    for _ in range(2):  # the second time in the backward pass
        layer.store(key, key)
    assert caches[0].k_caches[0].shape == key.shape
    caches.set_mode("read")
    call, must_run = FAMILIES["GlmImagePipeline"].network_call({"kv_caches": caches})
    caches.set_mode("skip")
    layer = call["kv_caches"][0]
    assert not must_run and layer.mode == "read" and layer.get(key, key)[0].shape == (1, 4, 1, 1)
