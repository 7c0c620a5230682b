"""Settings that are out of range, unknown, or contradict each other are refused in one sentence."""

import numpy as np
import pytest
import torch
from command_line import make_config

from diffusion_grpo import DiffusionGRPOConfig

REFUSED = [
    ({"num_generations": 1}, "num_generations must be at least 2, got 1; a single sample has no group"),
    ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, "3 x 1 x 2 = 6.*num_generations=16"),
    ({"steps_per_generation": 33}, "multiple of gradient_accumulation_steps=32"),
    ({"best_of_n": 3}, "best_of_n must be even"),
    ({"best_of_n": 32}, "at most num_generations=16"),
    ({"optim": "lomo"}, "optim=.lomo."),
    ({"optim": "schedule_free_adamw"}, "different weights for training and for sampling.*such as adamw_torch"),
    ({"advantage_fn": "my.own", "advantage_estimator": "gae"}, "advantage_estimator='gae'.*leave one of them out"),
    ({"advantage_fn": "ranks"}, "'ranks' is not a dotted path; include the module, as in my_package.ranks"),
    (
        {"loss_type": "dpo", "drop_zero_advantages": True},
        "drop_zero_advantages=True weighs samples, but .* leave it",
    ),
    ({"loss_type": "gropo"}, "Did you mean 'grpo'"),
    (
        {"loss_type": "dapo"},
        "'dapo' differs from grpo only in how it averages over texts .* set loss_type='grpo', and",
    ),
    ({"loss_type": "Flow-GRPO"}, "loss_type='Flow-GRPO' is loss_type='grpo'\\.$"),
    ({"loss_type": "cispo"}, "'cispo' is not included; use 'grpo', or write a loss of your own"),
    ({"cache_prompt_embeds": "dsik"}, "cache_prompt_embeds='dsik' is unknown.*Did you mean 'disk'"),
    (
        {"cache_prompt_embeds": "disk", "train_component": "transformer, text_encoder"},
        "keeps what frozen text encoders return, and train_component='transformer, text_encoder' trains one",
    ),
    ({"sde_type": "flow"}, "choose one of auto, flow_sde, dance_sde, wan_sde, cps, precise, ddim"),
    ({"scale_rewards": "groups"}, "Did you mean 'group'"),
    ({"old_log_prob": "rolout"}, "auto, rollout, replay"),
    ({"step_weight": "velocities"}, "choose one of none, noise, velocity, guard. Did you mean 'velocity'"),
    ({"loss_type": "dppo", "importance_sampling_level": "sequence"}, "must be 'token', not 'sequence'"),
    (
        {"loss_type": "grpo_guard", "step_weight": "noise"},
        "by itself; leave step_weight='noise' out",
    ),
    (
        {"loss_type": "grpo_guard", "sde_type": "cps", "log_prob_type": "squared_error"},
        "leave log_prob_type='squared_error' out",
    ),
    ({"decode_batch_size": 0}, "decode_batch_size must be at least 1"),
    ({"offload_rewards": "gpu"}, "offload_rewards='gpu' is unknown; choose one of cpu"),
    ({"group_offload": "block"}, "choose one of block_level, leaf_level. Did you mean 'block_level'"),
    ({"group_offload": "block_level", "group_offload_blocks": 0}, "group_offload_blocks must be at least 1"),
    (
        {"group_offload": "block_level", "group_offload_blocks": 2, "group_offload_stream": True},
        "fetches blocks one by one; leave group_offload_blocks=2 out",
    ),
    ({"group_offload": "leaf_level", "torch_compile": True}, "compiles whole blocks.*use 'block_level'"),
    ({"torch_compile_mode": "reduce-overhead"}, "records CUDA graphs.*use 'max-autotune-no-cudagraphs'"),
    ({"torch_compile": True, "torch_compile_mode": "max-autotune"}, "torch_compile_mode='max-autotune' records CUDA"),
    (
        {"group_offload": "leaf_level", "activation_checkpointing_kwargs": {"use_reentrant": True}},
        "leave use_reentrant out",
    ),
    ({"multi_objective_aggregation": "sum"}, "normalize_then_sum"),
    ({"num_inference_steps": 1}, "num_inference_steps must be at least 2"),
    ({"selective_checkpointing": 0.0}, r"\(0, 1\]"),
    ({"noise_level": 0.0}, "noise_level must be above 0"),
    ({"sde_type": "cps", "noise_level": 1.5}, r"noise_level must lie in \(0, 1\] for sde_type='cps'"),
    ({"log_prob_type": "square"}, "choose one of gaussian, squared_error"),
    (
        {"log_prob_type": "squared_error", "sde_type": "flow_sde"},
        "but the process is flow_sde; set sde_type='cps'",
    ),
    ({"ema_decay": 1.0}, "between 0 and 1"),
    ({"beta": -0.1}, "beta must be at least 0"),
    ({"sync_ref_model": True}, "set beta above 0"),
    ({"kl_reward": -0.1}, "kl_reward must be at least 0"),
    ({"reward_baseline": "prompt"}, "choose one of group, batch"),
    ({"advantage_estimator": "gea"}, "choose one of group, gae.*Did you mean 'gae'"),
    (
        {"advantage_estimator": "gae", "multi_objective_aggregation": "normalize_then_sum"},
        "one value for all rewards, so multi_objective_aggregation cannot be 'normalize_then_sum'",
    ),
    (
        {"step_weight": "velocity", "sde_type": "cps", "log_prob_type": "squared_error"},
        "step_weight='velocity' balances the gradients of Gaussian log-probabilities",
    ),
    (
        {"advantage_estimator": "gae", "multi_objective_aggregation": "loss_per_reward"},
        "one value for all rewards.*use sum_then_normalize",
    ),
    ({"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
    ({"gae_lambda": -0.5}, r"gae_lambda must lie in \[0, 1\], got -0.5"),
    ({"value_clip": 0.0}, "value_clip must be above 0"),
    ({"value_learning_rate": -1.0}, "value_learning_rate must be at least 0"),
    ({"num_batches_per_step": 0}, "num_batches_per_step must be at least 1"),
    ({"num_batches_per_step": 3}, "num_batches_per_step=3 does not divide the 8 prompts"),
    (
        {"num_generations": 1, "reward_baseline": "batch", "num_batches_per_step": 128},
        "batch of one sample.*lower num_batches_per_step",
    ),
    ({"selective_checkpointing": 0.0}, r"selective_checkpointing must lie in \(0, 1\]"),
    ({"remove_unused_columns": True}, "must stay False"),
    (
        {"warmup_steps": 5, "lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
        "warmup_steps=5 has no effect with lr_scheduler_type='greedy'.*{warmup: ...}",
    ),
    (
        {"warmup_steps": 0.1, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        "warmup_steps=0.1 has no effect.*use another schedule",
    ),
    ({"fp16": True, "use_cpu": True}, "fp16=True needs a GPU.*set fp16=False .bf16=True works"),
    ({"save_strategy": "best"}, "save_strategy='best' saves after evaluations.*set eval_strategy='steps'"),
    ({"validation_prompts": "a cat"}, "validation_prompts='a cat' must be a list of str"),
    ({"watch_rewards": "sharpness"}, "watch_rewards='sharpness' must be a list of str"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_refused_with_what_to_change(settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_config(**settings)
    assert "\n" not in str(refusal.value)


WRONG_TYPES = [
    ({"learning_rate": "1e-3"}, "learning_rate='1e-3' is of type str, but must be of type float"),
    ({"bf16": "False"}, "bf16='False' is of type str, but must be of type bool"),
    ({"num_generations": "8"}, "num_generations='8' is of type str, but must be of type int"),
    ({"max_steps": 10.0}, "max_steps=10.0 is of type float, but must be of type int"),
    ({"beta": True}, "beta=True is of type bool, but must be of type float"),
    ({"max_steps": None}, "max_steps=None is of type NoneType, but must be of type int"),
    ({"beta": float("nan")}, "beta is not a number; give a finite one"),
    ({"reward_weights": 0.5}, "reward_weights=0.5 must be a list of float"),
    ({"trained_steps": 3}, "trained_steps=3 must be all or"),
    ({"trained_steps": [0.0, 2.0]}, r"trained_steps=\[0.0, 2.0\] must be all or"),
    ({"pipeline_kwargs": [1]}, r"pipeline_kwargs=\[1\] is of type list where a mapping is expected"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"seed": 2**32}, r"seed must be below 2\*\*32, got 4294967296"),
    ({"height": 0}, "height must be at least 1, got 0"),
    ({"num_frames": 0}, "num_frames must be at least 1, got 0"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_TYPES, ids=str)
def test_other_types_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


@pytest.mark.parametrize("path", ["notes.txt", "notes.txt/run/1"])
def test_a_file_is_no_output_folder(path, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="output_dir: .*notes.txt is a file; give the path of a folder"):
        DiffusionGRPOConfig(str(tmp_path / path), use_cpu=True)


def test_numbers_of_numpy_are_numbers():
    args = make_config(num_generations=np.int64(8), learning_rate=np.float32(0.5), beta=1)
    assert args.num_generations == 8 and args.learning_rate == 0.5


@pytest.mark.parametrize("has_gpu", [False, True])
def test_fp16_needs_a_gpu(monkeypatch, has_gpu):
    """accelerate notes it down, and trains in float32."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    if has_gpu:
        assert DiffusionGRPOConfig("out", fp16=True).fp16
        return
    with pytest.raises(ValueError, match="fp16=True needs a GPU.*set fp16=False"):
        DiffusionGRPOConfig("out", fp16=True)


def test_noise_levels_in_words_are_refused_in_python():
    """The command line makes numbers of them."""
    with pytest.raises(ValueError, match=r"sigmas must be a list of at least two numbers.* got \['1.0', 0.5\]"):
        DiffusionGRPOConfig("run", use_cpu=True, sigmas=["1.0", 0.5], num_inference_steps=2)
