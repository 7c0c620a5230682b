"""Settings that are out of range, unknown, or contradict each other are refused in one sentence that names them."""

import numpy as np
import pytest
import torch
from command_line import make_config

from diffusion_grpo import DiffusionGRPOConfig

SIGMAS = {"num_inference_steps": 3, "eval_num_inference_steps": 3}
REFUSED = [
    # types, words, ranges
    ("learning_rate", {"learning_rate": "1e-3"}),
    ("max_steps", {"max_steps": None}),
    ("beta", {"beta": True}),
    ("beta", {"beta": float("nan")}),
    ("beta", {"beta": -0.1}),
    ("pipeline_kwargs", {"pipeline_kwargs": "[1]"}),
    ("num_inference_steps", {"num_inference_steps": 1}),
    ("ema_decay", {"ema_decay": 1.0}),
    ("scale_rewards.*'group'", {"scale_rewards": "groups"}),
    ("loss_type.*'grpo'", {"loss_type": "gropo"}),
    ("loss_type='grpo'", {"loss_type": "dapo"}),
    # of transformers
    ("remove_unused_columns", {"remove_unused_columns": True}),
    ("optim", {"optim": "lomo"}),
    ("optim", {"optim": "galore_adamw_layerwise"}),
    ("save_strategy", {"save_strategy": "best"}),
    ("torch_compile_mode", {"torch_compile_mode": "reduce-overhead"}),
    ("warmup_steps", {"warmup_steps": 5, "lr_scheduler_type": "greedy", "eval_strategy": "epoch"}),
    ("fp16", {"fp16": True}),
    # groups and batches
    ("num_generations", {"num_generations": 1}),
    ("num_generations=16", {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}),
    ("gradient_accumulation_steps=32", {"steps_per_generation": 33}),
    ("best_of_n", {"best_of_n": 3}),
    ("num_batches_per_step", {"num_batches_per_step": 3}),
    ("num_batches_per_step", {"num_generations": 1, "reward_baseline": "batch", "num_batches_per_step": 128}),
    ("samples_per_latent", {"samples_per_latent": 6}),
    # steps
    ("trained_steps", {"trained_steps": [2, 10]}),
    ("trained_steps", {"trained_steps": 3}),
    ("num_trained_steps", {"trained_steps": [0, 4], "num_trained_steps": 5}),
    ("num_inference_steps: 2", {"sigmas": [1.0, 0.5], "eval_num_inference_steps": 4}),
    ("sigmas", {"sigmas": [0.9, 0.6, 0.3], **SIGMAS}),
    ("sigmas", {"sigmas": [1.0, 0.3, 0.6], **SIGMAS}),
    ("sigmas=odd must be even", {"sigmas": "odd", **SIGMAS}),
    ("eval_num_inference_steps", {"sigmas": [1.0, 0.6, 0.3], "num_inference_steps": 3}),
    ("eval_num_inference_steps", {"sigmas": "even"}),
    # losses and advantages
    ("importance_sampling_level", {"loss_type": "dppo", "importance_sampling_level": "sequence"}),
    ("step_weight", {"loss_type": "grpo_guard", "step_weight": "noise"}),
    ("log_prob_type", {"loss_type": "grpo_guard", "sde_type": "cps", "log_prob_type": "squared_error"}),
    ("log_prob_type", {"step_weight": "velocity", "sde_type": "cps", "log_prob_type": "squared_error"}),
    ("sync_ref_model", {"sync_ref_model": True}),
    ("advantage_fn", {"advantage_fn": "my.own", "advantage_estimator": "gae"}),
    ("advantage_fn", {"advantage_fn": "ranks"}),
    ("aggregation", {"advantage_estimator": "gae", "multi_objective_aggregation": "normalize_then_sum"}),
    ("cache_prompt_embeds", {"cache_prompt_embeds": "disk", "train_component": "transformer, text_encoder"}),
    # quantised bases
    ("load_in_8bit", {"load_in_4bit": True, "load_in_8bit": True}),
    ("quantization.*'torchao'", {"quantization": {"transformer": "torcha"}}),
    ("quantization.*gguf", {"quantization": {"transformer": "gguf"}}),
    ("bnb_4bit_quant_storage", {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "bf16": False}),
]


@pytest.mark.parametrize(("name", "settings"), REFUSED, ids=str)
def test_refused_in_a_sentence_that_names_the_setting(name, settings):
    with pytest.raises(ValueError, match=name) as refusal:
        make_config(**settings)
    assert "\n" not in str(refusal.value)


def test_a_file_is_no_output_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="output_dir"):
        DiffusionGRPOConfig(str(tmp_path / "notes.txt/run/1"), use_cpu=True)


def test_numbers_of_numpy_are_numbers():
    args = make_config(num_generations=np.int64(8), learning_rate=np.float32(0.5), beta=1)
    assert args.num_generations == 8 and args.learning_rate == 0.5


def test_fp16_is_for_machines_with_a_gpu(monkeypatch):
    """Without one, accelerate notes it down, and trains in float32."""
    with pytest.raises(ValueError, match="fp16"):
        DiffusionGRPOConfig("out", fp16=True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert DiffusionGRPOConfig("out", fp16=True).fp16
