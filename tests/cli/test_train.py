"""`diffusion-grpo train`: what it refuses before a model is loaded, and the folder of a whole run."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_pipelines
from command_line import SIZE, refusal
from datasets import Dataset

from diffusion_grpo import cli
from diffusion_grpo.cli.train import find_baseline_argument, measure_baselines
from diffusion_grpo.config import parse
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.training.checkpoints import lock_folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"learning_rat": 1e-3}, "`learning_rate`"),
        ({"reward_funcs": ["brigthness"]}, "'brightness'"),
        ({"reward_funcs": {"ssim": {"target_column": "goal"}}}, "'goal'"),
        ({"dataset": "missing.txt"}, "missing.txt"),
        ({"baseline_guidance_scales": [2.0]}, "eval_dataset"),
        ({"report_experiment": "missing.json"}, "missing.json"),
        ({"model": "./no/such/folder"}, "./no/such/folder"),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(changes, expected, config_file, no_model, capsys):
    assert expected in refusal(capsys, "train", config_file(**changes))


def test_files_that_are_no_settings_are_refused(tmp_path, no_model, capsys):
    assert "no file" in refusal(capsys, "train", str(tmp_path / "missing.yaml"))
    for content, expected in (("a: [1, 2", "not YAML"), ("- a\n- b\n", "list")):
        (tmp_path / "config.yaml").write_text(content)
        assert expected in refusal(capsys, "train", str(tmp_path / "config.yaml"))
    assert "`model`, `dataset`, `reward_funcs`" in refusal(capsys, "train")


def test_the_file_is_read_once(config_file, no_model, capsys, monkeypatch):
    read, read_yaml = [], parse.read_yaml
    monkeypatch.setattr(parse, "read_yaml", lambda file: read.append(file) or read_yaml(file))
    refusal(capsys, "train", config_file(model="./no/such/folder"))
    assert len(read) == 1


def test_flags_are_checked_like_keys(config_file, no_model, capsys):
    assert "`beta`" in refusal(capsys, "train", config_file(), "--bta", "0.1")
    assert "does not belong to a key" in refusal(capsys, "train", config_file(), "0.1")
    assert "reward_funcs=True" in refusal(capsys, "train", config_file(), "--reward_funcs")
    assert "HF_HUB_OFFLINE" in refusal(capsys, "train", config_file(), "--push_to_hub", "true")
    assert "no folder gone/5" in refusal(capsys, "train", config_file(), "--resume_from_checkpoint", "gone/5")


def test_a_folder_that_holds_a_run_is_refused_before_prompts_are_loaded(config_file, capsys, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    monkeypatch.setattr("diffusion_grpo.data.prompts.load_prompts", None)
    for words in ([config_file()], [config_file(), "--resume_from_checkpoint", "false"]):
        assert "already contains a run (newest: checkpoint-5)" in refusal(capsys, "train", *words)


def test_a_start_that_is_refused_leaves_the_settings_of_the_run_there(config_file, model, tmp_path, capsys):
    path = config_file(model=model, use_peft=True, max_steps=1, disable_tqdm=True, save_strategy="no", **SIZE)
    settings = tmp_path / "run" / "train.yaml"
    settings.parent.mkdir()
    settings.write_text("of the run there\n")
    with lock_folder(settings.parent):
        assert cli.main(["train", path]) == 2
    assert "is being written by another run" in capsys.readouterr().err
    assert settings.read_text() == "of the run there\n"
    assert cli.main(["train", path]) == 0 and "max_steps: 1" in settings.read_text()


def test_a_file_of_settings_that_the_run_would_write_over_is_refused(config_file, no_model, capsys, tmp_path):
    file = tmp_path / "run" / "train.yaml"
    file.parent.mkdir()
    text = "# mine\n" + Path(config_file(model="tiny")).read_text()
    file.write_text(text)
    assert "rename the file" in refusal(capsys, "train", str(file))
    assert "rename the file" in refusal(capsys, "train", str(file), "--num_processes", "2")
    assert file.read_text() == text


def test_baselines_are_guided_by_the_argument_that_the_pipeline_heeds(tmp_path):
    pipe, _ = tiny_pipelines.build("qwen_image")
    prompts = Dataset.from_dict({"prompt": ["a"]})

    def trainer(arguments: dict | None, dataset: Dataset = prompts, **others) -> SimpleNamespace:
        policy, args = SimpleNamespace(networks=[pipe.transformer]), SimpleNamespace(pipeline_kwargs=arguments)
        return SimpleNamespace(pipe=pipe, policy=policy, args=args, eval_dataset=dataset, **others)

    argument = find_baseline_argument(trainer({"negative_prompt": " "}), [4.0])
    assert argument == "true_cfg_scale" == find_baseline_argument(trainer(None), [1.0])
    assert find_baseline_argument(trainer(None, prompts.add_column("negative_prompt", ["b"])), [4.0]) == argument
    with pytest.raises(ValueError, match="QwenImagePipeline ignores without a negative prompt; add one"):
        find_baseline_argument(trainer(None), [1.0, 4.0])

    calls = []

    def evaluate(metric_key_prefix: str, pipeline_kwargs: dict) -> dict[str, float]:
        calls.append(pipeline_kwargs)
        return {f"{metric_key_prefix}_reward": 0.5}

    evaluated = {"evaluate": evaluate, "rewards": SimpleNamespace(all=[]), "is_world_process_zero": lambda: True}
    measure_baselines(trainer({"negative_prompt": " "}, **evaluated), [1.0, 4.0], tmp_path / "b.json")
    assert calls == [{"true_cfg_scale": 1.0}, {"true_cfg_scale": 4.0}]
    assert [each["name"] for each in json.loads((tmp_path / "b.json").read_text())] == ["guidance 1", "guidance 4"]


@pytest.mark.plots
def test_train_leaves_a_whole_run_folder(config_file, model, tmp_path, capsys):
    path = config_file(
        model=model,
        eval_dataset=str(tmp_path / "prompts.txt"),
        eval_reward_funcs=["jpeg_compressibility"],
        eval_strategy="steps",
        eval_steps=1,
        baseline_guidance_scales=[2.0],
        pipeline_kwargs={"max_sequence_length": 8},
        guidance_scale=1.0,
        use_peft=True,
        lora_r=2,
        max_steps=2,
        disable_tqdm=True,
        **SIZE,
    )
    assert cli.main(["train", path]) == 0
    run = tmp_path / "run"
    files = {
        "report.html",
        "summary.json",
        "run.json",
        "baselines.json",
        "pytorch_lora_weights.safetensors",
        "grid.png",
    }
    assert files <= {file.name for file in run.iterdir()}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == summary["evaluation_prompts"] == summary["evaluation_prompts_in_training"] == 2
    assert set(summary["rewards"]) == {"brightness", "jpeg_compressibility"}
    baseline = json.loads((run / "baselines.json").read_text())[0]
    assert baseline["name"] == "guidance 2" and set(baseline["rewards"]) == set(summary["rewards"])
    assert "guidance 2" in (run / "report.html").read_text()
    printed = capsys.readouterr().out
    assert f"Evaluations: {run / 'evaluations'}" in printed
    card = (run / "README.md").read_text()
    assert "The prompts are from prompts.txt.\n" in card and str(tmp_path) not in card
    assert "\ndiffusion-grpo train train.yaml\n" in card
    assert parse_train_arguments(str(run / "train.yaml"), ["--dataset", "tiny"])[2].max_steps == 2


def interrupting(images, trainer_state, **columns):
    """A reward during which somebody presses Ctrl-C, once there is a checkpoint."""
    if trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    return [0.0] * len(images)


@pytest.fixture
def heard():
    """SIGINT as in a terminal: a shell's background jobs ignore it, and so would tests among them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_says_in_one_line_how_to_go_on(config_file, model, tmp_path, capsys, saves, heard):
    path = config_file(
        model=model,
        reward_funcs=[f"{__name__}.interrupting"],
        pipeline_kwargs={"max_sequence_length": 8},
        guidance_scale=1.0,
        use_peft=True,
        lora_r=2,
        max_steps=2,
        save_strategy="steps",
        save_steps=1 if saves else 2,
        disable_tqdm=True,
        **SIZE,
    )
    assert cli.main(["train", path]) == 130
    last = capsys.readouterr().err.strip().splitlines()[-1]
    newest = tmp_path / "run" / "checkpoint-1"
    how = f"continue from {newest} with resume_from_checkpoint" if saves else "there is no checkpoint yet"
    assert last.startswith(f"Interrupted after 1 update; {how}")
