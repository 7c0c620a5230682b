"""What is checked and decided before a model is loaded."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import tiny_pipelines
import transformers
from command_line import make_config
from datasets import Dataset, Image
from peft import LoraConfig
from plain_images import noise
from tiny_runs import brightness, trainer_for

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.report.record import list_changed_settings
from diffusion_grpo.training.preflight import (
    check_datasets,
    check_run,
    check_watched,
    choose_backend,
    describe_run,
    load_run_rewards,
    note_settings,
    prepare_args,
    prepare_training,
    refuse_changed_settings,
)


def test_debug_lines_have_a_mark_of_their_own(tmp_path, caplog):
    ours = logging.getLogger("diffusion_grpo")
    before, of_transformers = ours.level, transformers.utils.logging.get_verbosity()
    try:
        trainer_for(tmp_path, max_steps=1, log_level="debug").train()
    finally:
        ours.setLevel(before)
        transformers.utils.logging.set_verbosity(of_transformers)  # set too; tests see its lines where CI is set
    ours = [record for record in caplog.records if "diffusion_grpo" in record.name]
    lines = [record.getMessage() for record in ours if record.levelno == logging.DEBUG]
    assert lines and all(line.startswith("RL_METRIC: ") for line in lines)
    for part in ("'latents': (", "rewards (8, 1)", "timesteps [", "ratio off by 0", "peak memory"):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_funcs": "txet"}, "text"),
        ({"reward_weights": [1.0, 2.0]}, "2 entries for 1 reward"),
        ({"lora_dropout": 0.05}, "lora_dropout"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "eval_dataset"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_before_a_model_is_loaded(tmp_path, change, message):
    of_lora = {name: value for name, value in change.items() if name == "lora_dropout"}
    arguments = {
        "model": "no/such-model",  # loading it would fail with another message
        "reward_funcs": brightness,
        "train_dataset": Dataset.from_dict({"prompt": ["a"]}),
        "peft_config": LoraConfig(r=2, target_modules=["to_q"], **of_lora),
        "eval_reward_funcs": None,
    }
    settings = {name: value for name, value in change.items() if name not in {*of_lora, *arguments}}
    arguments |= {name: value for name, value in change.items() if name in arguments}
    with pytest.raises((ValueError, ImportError), match=message):
        DiffusionGRPOTrainer(args=DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **settings), **arguments)


def test_defaults_name_the_output_after_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe, _ = tiny_pipelines.build("sd3")
    trainer = DiffusionGRPOTrainer(pipe, brightness, train_dataset=Dataset.from_dict({"prompt": ["a"]}))
    assert trainer.args.output_dir == str(tmp_path / "StableDiffusion3Pipeline-GRPO")
    assert dataclasses.is_dataclass(trainer.args)


def test_settings_serve_several_trainers(tmp_path):
    """What is filled in for one, such as the learning rate, does not stay for the next."""
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, height=8, width=8)
    rates, rows = [], Dataset.from_dict({"prompt": ["a"]})
    for peft_config in (None, LoraConfig()):
        pipe, _ = tiny_pipelines.build("sd3")
        trainer = DiffusionGRPOTrainer(pipe, brightness, args, rows, peft_config=peft_config)
        rates.append(trainer.args.learning_rate)
        shown = trainer.run["settings"]
        assert shown["target_change"] == 0.25 and "learning_rate" not in shown  # which is only its limit
    assert rates == [0.01, 0.01] and args.learning_rate is None and args.target_change is None
    plain = DiffusionGRPOConfig(str(tmp_path), use_cpu=True)
    assert prepare_args("tiny", plain).height == 32 and plain.height is None
    assert prepare_args("owner/name", plain).height is None


def test_settings_that_a_trainer_has_read_are_not_changed(tmp_path):
    trainer = trainer_for(tmp_path)
    noted = note_settings(trainer.args)
    trainer.args.max_steps, trainer.args.learning_rate, trainer.args.num_generations_eval = 2, 1e-4, 3
    refuse_changed_settings(noted, trainer.args)
    for name, value in {"old_log_prob": "replay", "seed": 7, "pipeline_kwargs": {"max_sequence_length": 8}}.items():
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        with pytest.raises(ValueError, match=f"^{name} was changed"):
            trainer.train()
        setattr(trainer.args, name, before)


def test_settings_may_have_more_fields(tmp_path):
    @dataclasses.dataclass
    class OwnConfig(DiffusionGRPOConfig):
        token_of_mine: str = "none"

    args = OwnConfig(str(tmp_path), token_of_mine="secret", use_cpu=True, height=8, width=8)
    pipe, _ = tiny_pipelines.build("sd3")
    trainer = DiffusionGRPOTrainer(pipe, brightness, args, Dataset.from_dict({"prompt": ["a"]}))
    assert isinstance(trainer.args, OwnConfig) and trainer.args.token_of_mine == "secret"
    assert list_changed_settings(args) == {"height": 8, "width": 8}


@pytest.mark.parametrize(
    ("peft_config", "settings", "is_full", "rate", "change"),
    [
        (LoraConfig(), {}, False, 0.01, 0.25),
        (None, {}, True, 0.01, 0.25),
        (None, {"lora_adapter": "style"}, False, 0.01, 0.25),
        (None, {"learning_rate": 0.5}, True, 0.5, None),
        (None, {"learning_rate": 0.5, "target_change": 0.1}, True, 0.5, 0.1),
    ],
)
def test_the_learning_rate_regulates_itself_unless_it_is_set(peft_config, settings, is_full, rate, change):
    args = make_config(**{"learning_rate": None, **settings})
    assert prepare_training(args, peft_config) is is_full
    assert (args.learning_rate, args.target_change) == (rate, change)


@pytest.mark.parametrize(("peft_config", "rate"), [(LoraConfig(), 3e-4), (None, 1e-5)])
def test_an_optimizer_of_the_users_own_has_its_own_rate(peft_config, rate):
    args = make_config(learning_rate=None)
    prepare_training(args, peft_config, has_optimizer=True)
    assert (args.learning_rate, args.target_change) == (rate, None)
    args = make_config(learning_rate=None)
    config = SimpleNamespace(config={"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    args.deepspeed_plugin = SimpleNamespace(hf_ds_config=config)
    prepare_training(args, peft_config)
    assert (args.learning_rate, args.target_change) == (rate, None)


def test_rewards_that_are_trained_on_are_evaluated_anyway():
    rewards = load_run_rewards({"brightness": 2.0}, ["brightness", "sharpness"], make_config())
    assert rewards.names == ["brightness"] and rewards.weights == [2.0]
    assert [reward.name for reward in rewards.all] == ["brightness", "sharpness"]
    with pytest.raises(ValueError, match="eval_reward_funcs has two rewards called 'sharpness'"):
        load_run_rewards("brightness", ["sharpness", "sharpness"], make_config())


def test_each_dataset_has_the_columns_of_its_own_rewards():
    rewards = load_run_rewards("brightness", ["ssim"], make_config())
    prompts = Dataset.from_dict({"prompt": ["a"]})
    targets = Dataset.from_dict({"prompt": ["a"], "target": ["a.png"]})
    check_datasets(rewards, make_config(), prompts, targets)  # `ssim` is asked for in evaluations only
    with pytest.raises(ValueError, match="'ssim' needs the column 'target', which cats lacks"):
        check_datasets(rewards, make_config(), targets, {"cats": prompts})
    with pytest.raises(ValueError, match="eval_reward_funcs=ssim has no prompts"):
        check_datasets(rewards, make_config(), targets, None)


def test_watched_rewards_that_evaluations_could_not_call_are_refused():
    prompts, targets = (Dataset.from_dict(rows) for rows in ({"prompt": ["a"]}, {"prompt": ["a"], "target": ["b"]}))

    def check(*names, dataset=prompts):
        return [reward.name for reward in check_watched(make_config(watch_rewards=list(names)), [], dataset)]

    assert check("auto", "psnr", "sharpness", dataset=targets) == ["psnr", "sharpness"] and check() == []
    assert check("psnr", dataset=None) == ["psnr"]
    with pytest.raises(ValueError, match="'target'.*cats"):
        check("auto", "psnr", dataset={"dogs": targets, "cats": prompts})


def test_a_column_that_only_a_watched_reward_names_is_not_idle(tmp_path, caplog):
    targets = Dataset.from_dict({"prompt": ["a"], "target": [noise()]}).cast_column("target", Image())
    pipe, _ = tiny_pipelines.build("sd3")
    for names, is_idle in ((["sharpness"], True), (["psnr"], False)):
        caplog.clear()
        args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, watch_rewards=names)
        with caplog.at_level(logging.WARNING):
            check_run(pipe, brightness, None, args, Dataset.from_dict({"prompt": ["a"]}), targets, LoraConfig())
        assert ("no reward names it" in caplog.text) == is_idle


def test_several_gpus_need_a_launcher():
    args = SimpleNamespace(bf16=False, fp16=False, n_gpu=2, context_parallel_size=1, world_size=1, process_index=0)
    args.context_parallel_type = "ulysses"
    with pytest.raises(ValueError, match="Several GPUs need a launcher"):
        choose_backend(args)


def test_the_record_of_a_run_has_its_rewards_and_their_options():
    rewards = load_run_rewards({"ssim": {"target_column": "goal"}}, ["sharpness"], make_config())
    record = describe_run("owner/name", make_config(), LoraConfig(r=4), rewards)
    assert (record["reward_funcs"], record["eval_reward_funcs"]) == (["ssim"], ["sharpness"])
    assert record["reward_options"]["ssim"] == {"target_column": "goal"} and record["trains_by"] == "LoRA rank 4"


@dataclasses.dataclass
class Judge:
    """A reward of the user's own."""

    api_key: str
    model: str

    def __call__(self, images, **columns):
        return [0.0] * len(images)


def test_the_record_holds_no_secret_of_a_reward():
    rewards = load_run_rewards({f"{__name__}.Judge": {"api_key": "sk-1", "model": "a/b"}}, [], make_config())
    record = describe_run("owner/name", make_config(), None, rewards)
    assert list(record["reward_options"].values()) == [{"model": "a/b"}] and "sk-1" not in str(record)
