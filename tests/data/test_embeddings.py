"""Prompts that are encoded already: a dataset of embeddings trains as the prompts they come from."""

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_pipelines import build
from tiny_runs import LORA, PROMPTS, SETTINGS, brightness, logged, trained_weights

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer

SIZES = {"height": 16, "width": 16, "guidance_scale": 4.0, "pipeline_kwargs": {"max_sequence_length": 8}}
NAMES = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def embeddings() -> dict[str, list]:
    """Columns of what the tiny SD3 encodes each prompt to, as lists of numbers."""
    pipe, _ = build("sd3")
    with torch.no_grad():
        rows = [pipe.encode_prompt(text, text, text, max_sequence_length=8) for text in PROMPTS]
    return {name: [row[place][0].tolist() for row in rows] for place, name in enumerate(NAMES)}


def trained(folder, dataset, reward=brightness, **settings):
    """A trainer of the tiny SD3 after two updates."""
    trainer = DiffusionGRPOTrainer(
        model=build("sd3")[0],
        reward_funcs=reward,
        args=DiffusionGRPOConfig(str(folder), **{**SETTINGS, **SIZES, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    return trainer


def test_embeddings_train_as_their_prompts(tmp_path):
    given = []

    def spying(images, **columns):
        given.append(columns.keys())
        return brightness(images)

    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    texts = trained(tmp_path / "texts", Dataset.from_dict({"prompt": PROMPTS}), **evaluated)
    encoded = trained(tmp_path / "encoded", Dataset.from_dict(embeddings()), spying, **evaluated)
    one, other = trained_weights(texts), trained_weights(encoded)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6
    assert max(logged(encoded, "ratio/max_error")) == 0.0
    assert given and all("prompts" not in keys and "prompt_embeds" in keys for keys in given)
    tables = [pyarrow.parquet.read_table(path) for path in (tmp_path / "encoded" / "samples").glob("*.parquet")]
    assert tables and all(table["prompt"].to_pylist() == [""] * len(table) for table in tables)
    assert (tmp_path / "encoded" / "pytorch_lora_weights.safetensors").is_file() or encoded.save_model() is None


def test_prompts_beside_embeddings_are_for_the_rewards(tmp_path):
    seen = []

    def reads(images, prompts, **columns):
        seen.extend(prompts)
        return brightness(images)

    columns = embeddings() | {"prompt": ["another text"] * len(PROMPTS)}
    trainer = trained(tmp_path / "both", Dataset.from_dict(columns), reads, max_steps=1)
    assert set(seen) == {"another text"} and max(logged(trainer, "ratio/max_error")) == 0.0


def test_what_embeddings_cannot_do_is_refused(tmp_path):
    def reads(images, prompts):
        return brightness(images)

    dataset = Dataset.from_dict(embeddings())
    with pytest.raises(ValueError, match="'reads' needs prompts, and train_dataset has no column 'prompt'"):
        trained(tmp_path / "a", dataset, reads)
    pipe, _ = build("dit")
    with pytest.raises(ValueError, match="no column 'prompt', and DiTPipeline takes no prompt_embeds"):
        args = DiffusionGRPOConfig(str(tmp_path / "b"), **SETTINGS)
        DiffusionGRPOTrainer(model=pipe, reward_funcs=brightness, args=args, train_dataset=dataset)
