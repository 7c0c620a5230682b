"""From what the user names to a pipeline ready to train."""

import pytest
import tiny_pipelines
import torch
from command_line import make_config
from peft import LoraConfig
from tiny_runs import LORA, are_equal, brightness, finished_run, logged, trained_weights, trainer_for

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.training.model import (
    check_gradient_range,
    choose_dtype,
    load_pipeline,
    load_plain_pipeline,
    prepare_model,
)


def test_everything_is_frozen_and_in_eval_mode_but_what_is_trained(tmp_path):
    """Dropout in a text encoder would part the replay from the rollout."""
    pipe, _ = tiny_pipelines.build("sd3")
    parts = [pipe.text_encoder, pipe.text_encoder_2, pipe.vae, pipe.transformer]
    for part in parts:
        part.train().requires_grad_(True)
    prepare_model(pipe, DiffusionGRPOConfig(str(tmp_path), use_cpu=True), LoraConfig(**LORA))
    assert not any(module.training for part in parts for module in part.modules())
    trained = [name for part in parts for name, value in part.named_parameters() if value.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_a_part_that_the_class_may_lack_is_not_loaded_where_it_is_given(tmp_path):
    """As for plans, which have no weights; diffusers' base class knows only parts that no pipeline lacks."""
    pipe, _ = tiny_pipelines.build("wan")
    pipe.save_pretrained(tmp_path)
    next((tmp_path / "transformer").glob("*.safetensors")).unlink()
    args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True)
    loaded = load_pipeline(str(tmp_path), args, False, parts={"transformer": pipe.transformer})
    assert loaded.transformer is pipe.transformer


def test_full_training_of_half_precision_weights_is_refused_without_mixed_precision(tmp_path, monkeypatch):
    build = tiny_pipelines.build
    monkeypatch.setattr(tiny_pipelines, "build", lambda *args: (build(*args)[0].to(torch.bfloat16), build(*args)[1]))
    with pytest.raises(ValueError, match="Full training needs float32.*bf16=True"):
        trainer_for(tmp_path, lora=False)
    trainer = finished_run(tmp_path / "mixed", lora=False, bf16=True, max_steps=1)
    assert trainer.model.dtype == torch.float32 and max(logged(trainer, "ratio/max_error")) <= 1e-5


def test_scheduler_kwargs_move_the_sigmas_and_stay_with_the_pipeline(tmp_path):
    trainer = trainer_for(tmp_path, scheduler_kwargs={"shift": 5.0})
    assert trainer.pipe.scheduler.config.shift == trainer.policy.scheduler.config.shift == 5.0
    assert tiny_pipelines.build("sd3")[0].scheduler.config.shift != 5.0
    trainer.train()
    assert max(logged(trainer, "ratio/max_error")) == 0.0
    with pytest.raises(ValueError, match="shfit"):
        trainer_for(tmp_path / "b", scheduler_kwargs={"shfit": 5.0})


def test_checkpointing_of_a_share_of_the_blocks(tmp_path, monkeypatch):
    """The same weights bit for bit, and a second forward pass in the blocks of that share alone."""
    build = tiny_pipelines.build

    def deeper(name, seed):
        pipe, inputs = build(name, seed)
        torch.manual_seed(0)
        pipe.transformer = type(pipe.transformer).from_config({**pipe.transformer.config, "num_layers": 4}).eval()
        return pipe, inputs

    def count(module, args):
        calls[id(module)] += 1

    monkeypatch.setattr(tiny_pipelines, "build", deeper)
    plain, weights = None, None
    for share, recomputed in ((None, []), (1.0, [0, 1, 2, 3]), (0.75, [0, 1, 3]), (0.25, [1])):
        chosen = {"gradient_checkpointing": True, "selective_checkpointing": share} if share else {}
        trainer = trainer_for(tmp_path / str(share), num_inference_steps=2, max_steps=1, lora=False, **chosen)
        blocks = trainer.pipe.transformer.transformer_blocks
        calls = {id(block): 0 for block in blocks}
        for block in blocks:
            block.register_forward_pre_hook(count)
        trainer.train()
        assert max(logged(trainer, "ratio/max_error")) == 0.0
        plain = plain or list(calls.values())
        weights = weights or trained_weights(trainer)
        assert are_equal(trained_weights(trainer), weights)
        again = [made - before for made, before in zip(calls.values(), plain, strict=True)]
        assert again == [2 if place in recomputed else 0 for place in range(4)]  # two micro-batches of one step


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1), 3], ids=["None", "module", "number"])
def test_a_model_that_is_no_pipeline(model):
    with pytest.raises(TypeError, match="model is a"):
        DiffusionGRPOTrainer(model, brightness)


def test_settings_of_another_trainer(tmp_path):
    from trl import GRPOConfig

    with pytest.raises(TypeError, match="DiffusionGRPOConfig"):
        DiffusionGRPOTrainer("tiny", brightness, args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_reentrant_checkpointing_under_a_lora_is_refused_before_a_model_is_loaded(tmp_path):
    """Blocks whose inputs need no gradient would get none, and the LoRA in them would stay as it is."""
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True gives a LoRA no gradient.*leave it out"):
        DiffusionGRPOTrainer("no/such-model", brightness, args=args, peft_config=LoraConfig(**LORA))


NETWORKS = [f"{name}{number}" for name in ("transformer", "unet", "prior", "decoder") for number in ("", "_2")]


@pytest.mark.parametrize(
    ("settings", "is_full", "expected"),
    [
        ({}, True, torch.float32),
        ({"model_init_kwargs": {"dtype": None}}, False, None),
        ({"bf16": True}, False, torch.bfloat16),
        ({"bf16": True, "train_component": "unet"}, True, {"unet": torch.float32, "default": torch.bfloat16}),
        ({"bf16": True}, True, dict.fromkeys(NETWORKS, torch.float32) | {"default": torch.bfloat16}),
        ({"model_init_kwargs": {"dtype": "float16"}}, False, torch.float16),
        ({"model_init_kwargs": {"torch_dtype": torch.float64}, "bf16": True}, True, torch.float64),
    ],
)
def test_the_dtype_in_which_a_pipeline_is_loaded(settings, is_full, expected):
    assert choose_dtype(make_config(**settings), is_full) == expected


@pytest.mark.parametrize("cached", ["off", "memory"])
def test_weights_saved_in_half_precision_train_in_float32(cached, tmp_path):
    """transformers would load the text encoders as they were saved, and the network takes float32."""
    tiny_pipelines.build("sd3")[0].to(torch.float16).save_pretrained(tmp_path / "model")
    trainer = trainer_for(
        tmp_path / "run", model=str(tmp_path / "model"), bf16=False, max_steps=1, cache_prompt_embeds=cached
    )
    before = trained_weights(trainer)
    trainer.train()
    assert not are_equal(trained_weights(trainer), before)
    assert trainer.pipe.transformer.dtype == trainer.pipe.vae.dtype == trainer.pipe.text_encoder.dtype == torch.float32


@pytest.mark.parametrize("value", ["bfloat61", {"transformer": "half precision"}])
def test_what_is_no_dtype_is_refused(value):
    with pytest.raises(ValueError, match="dtype.* is not a torch dtype"):
        choose_dtype(make_config(model_init_kwargs={"dtype": value}), False)


@pytest.mark.parametrize("dtype", ["float16", {"default": torch.float32, "transformer": torch.float16}])
def test_float16_needs_the_loss_scaling_of_fp16(dtype):
    named = make_config(model_init_kwargs={"torch_dtype": dtype})
    with pytest.raises(ValueError, match="set fp16=True"):
        DiffusionGRPOTrainer("no/such-model", brightness, args=named)
    pipe = tiny_pipelines.build("sd3")[0]
    check_gradient_range(pipe, make_config())
    pipe.transformer.to(torch.float16)
    with pytest.raises(ValueError, match="trained in float16"):
        check_gradient_range(pipe, make_config())
    named.fp16 = True
    check_gradient_range("no/such-model", named)
    check_gradient_range("no/such-model", make_config(model_init_kwargs={"torch_dtype": torch.bfloat16}))


def test_checkpointing_is_switched_off_where_a_training_before_had_it_on(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.transformer.enable_gradient_checkpointing()
    trainer_for(tmp_path / "off", model=pipe, gradient_checkpointing=False)
    assert not pipe.transformer.is_gradient_checkpointing


def test_weights_that_are_only_sampled_or_checked_are_in_half_precision_on_an_accelerator():
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        assert load_plain_pipeline("tiny", device=device).transformer.dtype == dtype
