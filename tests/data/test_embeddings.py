"""Prompts that are encoded already: a dataset of embeddings trains as the prompts they come from."""

import functools
import inspect

import diffusers
import embedding_runs
import pyarrow.parquet
import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny_pipelines import build
from tiny_runs import LORA, PROMPTS, SETTINGS, brightness, logged, trained_weights

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.embeddings import check_embeddings, find_replaced_texts, is_embedding
from diffusion_grpo.rewards import takes_latents

NAMES = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def trained(folder, name, data, reward, fixed, **settings):
    """A trainer of a tiny pipeline after one or two updates."""
    args, lora = DiffusionGRPOConfig(str(folder), **SETTINGS | settings, pipeline_kwargs=fixed), LoraConfig(**LORA)
    dataset = Dataset.from_dict(data)
    trainer = DiffusionGRPOTrainer(build(name)[0], reward, args, dataset, dataset, peft_config=lora)
    trainer.train()
    return trainer


def test_embeddings_train_as_their_prompts(tmp_path):
    given = []

    def spying(images, **columns):
        given.append(columns.keys())
        return brightness(images)

    fixed, columns = encode("sdxl", tmp_path)
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    texts = trained(tmp_path / "texts", "sdxl", {"prompt": PROMPTS}, brightness, fixed, **evaluated)
    encoded = trained(tmp_path / "encoded", "sdxl", columns, spying, fixed, **evaluated)
    one, other = trained_weights(texts), trained_weights(encoded)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6
    assert max(logged(encoded, "ratio/max_error")) == 0.0
    assert given and all("prompts" not in keys and "prompt_embeds" in keys for keys in given)
    tables = [pyarrow.parquet.read_table(path) for path in (tmp_path / "encoded" / "samples").glob("*.parquet")]
    assert tables and all(table["prompt"].to_pylist() == [""] * len(table) for table in tables)
    encoded.save_model()
    assert (tmp_path / "encoded" / "pytorch_lora_weights.safetensors").is_file()


def test_what_embeddings_cannot_do_is_refused(tmp_path):
    def reads(images, prompts):
        return brightness(images)

    data = {name: [[0.0] if "pooled" in name else [[0.0]]] for name in NAMES}
    with pytest.raises(ValueError, match="'reads' needs prompts, and train_dataset has no column 'prompt'"):
        trained(tmp_path / "a", "sd3", data, reads, {})
    with pytest.raises(ValueError, match="no column 'prompt', and DiTPipeline takes no prompt_embeds"):
        trained(tmp_path / "b", "dit", data, brightness, {})


# Embeddings of other families, beside the prompts that rewards read


def encode(name, tmp_path):
    """Columns with what a tiny pipeline encodes each prompt to, named as its parameters."""
    policy, inputs = embedding_runs.case(name, tmp_path)
    pipe, found = policy.pipe, []
    real = pipe.encode_prompt

    @functools.wraps(real)
    def keeping(*args, **kwargs):
        found.append(real(*args, **kwargs))
        return found[-1]

    columns = {column: [] for column in FAMILIES[name]}
    for text in PROMPTS:
        found.clear()
        policy.prompts.clear()
        pipe.encode_prompt = keeping  # until the call has ended
        policy.encode_prompts(inputs([{"prompt": text}]), 4)
        results = [leaf for result in found for leaf in result]
        for column, place in FAMILIES[name].items():
            columns[column].append(results[place][0].tolist())
    return inputs.fixed, columns


MASKED = ("embeds", "attention_mask")
# columns, and which of the results of `encode_prompt` they hold
FAMILIES = {
    "sdxl": {name: place for place, name in enumerate(NAMES)},
    "flux": {"prompt_embeds": 0, "pooled_prompt_embeds": 1},
    "wan": {"prompt_embeds": 0, "negative_prompt_embeds": 1},
    "pixart": {
        f"{sign}prompt_{kind}": 2 * bool(sign) + (kind != "embeds") for sign in ("", "negative_") for kind in MASKED
    },
    "qwen_image": {"prompt_embeds": 0, "negative_prompt_embeds": 2},
}


@pytest.mark.parametrize(
    ("name", "cache"),
    [("flux", "off"), ("pixart", "off"), ("qwen_image", "off"), ("pixart", "memory"), ("wan", "memory")],
)
def test_embeddings_of_each_family_train_as_their_prompts(name, cache, tmp_path):
    seen = []

    @takes_latents
    def mean(latents, prompts, **columns):
        seen.extend(prompts)
        return latents.flatten(1).mean(1)

    fixed, columns = encode(name, tmp_path)
    settings, others = (
        {"max_steps": 1, "watch_rewards": None, "cache_prompt_embeds": cache},
        [f"no {p}" for p in PROMPTS],
    )
    texts = trained_weights(trained(tmp_path / "texts", name, {"prompt": PROMPTS}, mean, fixed, **settings))
    seen.clear()
    encoded = trained(tmp_path / "encoded", name, {"prompt": others, **columns}, mean, fixed, **settings)
    encoded = trained_weights(encoded)
    assert max(float((texts[key] - encoded[key]).abs().max()) for key in texts) < 1e-6
    assert seen and set(seen) <= set(others)  # prompts beside embeddings are for the rewards


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"prompt_embeds": [[[[0.0, 1.0], [2.0, 3.0]]]], "pooled_prompt_embeds": [[0.0]]}, "'prompt_embeds'.* batch"),
        ({"prompt_embeds": [[[0.0]]], "pooled_prompt_embeds": [[[0.0]]]}, "'pooled_prompt_embeds'.* batch"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused_before_a_model_is_loaded(columns, names):
    accepted = set(inspect.signature(diffusers.StableDiffusion3Pipeline.__call__).parameters)
    for form in (None, "torch"):
        dataset = Dataset.from_dict(columns).with_format(form)
        with pytest.raises(ValueError, match=names):
            check_embeddings(dataset, accepted, "train_dataset")


def test_names_of_embeddings_and_the_texts_they_replace():
    assert all(map(is_embedding, ("prompt_embeds_t5", "negative_prompt_embeds_mask_2", "prompt_embeds_pooled")))
    assert not any(map(is_embedding, ("prompt", "prompt_embeds_scale", "image_embeds", "mask")))
    assert find_replaced_texts(frozenset({"prompt", "prompt_embeds_2_scale"})) == set()
    found = find_replaced_texts(frozenset({"prompt", "prompt_embeds_t5"}))
    assert {"prompt", "prompt_4"} <= found and "negative_prompt" not in found
    assert "negative_prompt" in find_replaced_texts(frozenset({"negative_prompt_embeds"}))
