"""What a model card says of starting its run again: everything that is needed, nothing that is private."""

import json
from pathlib import Path

import pytest
import yaml

from diffusion_grpo.config.arguments import LAUNCH_VARIABLE
from diffusion_grpo.config.parse import parse_train_arguments, resolve_values
from diffusion_grpo.run.reproduce import (
    describe_reproduction,
    describe_script,
    list_local_files,
    read_launch,
    refuse_own_settings,
    save_settings,
)

DEMO = str(Path(__file__).parents[2] / "examples" / "demo.yaml")
WORDS = ["--learning_rate", "1e-3", "--max_steps", "2", "--loss_type", "dppo", "--use_cpu", "true"]


def test_the_file_says_what_the_run_was_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "one"
    words = [*WORDS, "--output_dir", "outputs/one", "--resume_from_checkpoint", "true"]
    save_settings(run, resolve_values(DEMO, words))
    again = parse_train_arguments(str(run / "train.yaml"), [])
    first = parse_train_arguments(DEMO, [*WORDS, "--output_dir", "outputs/one"])
    assert again[0].report_experiment is None  # an earlier experiment is no part of the run
    first[0].report_experiment = None
    assert again[:2] == first[:2] and again[2].to_dict() == first[2].to_dict()


def test_the_file_holds_no_secret_and_no_folder(tmp_path):
    values = {
        "dataset": "/home/me/words.txt",
        "hub_token": "hf_1",
        "hub_model_id": "me/mine",
        "reward_funcs": [{"remote": {"url": "http://me:pass@a", "token": "abc", "token_env": "TOKEN"}}],
        "pipeline_kwargs": {"negative_prompt": "/imagine ugly, bad/blurry"},
        "model_init_kwargs": '{"token": "hf_1", "revision": "main"}',
    }
    save_settings(tmp_path / "run", values)
    text = (tmp_path / "run" / "train.yaml").read_text()
    assert yaml.safe_load(text) == {
        "dataset": "words.txt",
        "reward_funcs": [{"remote": {"url": "http://a", "token_env": "TOKEN"}}],
        "pipeline_kwargs": {"negative_prompt": "/imagine ugly, bad/blurry"},
        "model_init_kwargs": '{"revision": "main"}',
        "output_dir": "outputs/run",
    }


def test_settings_that_somebody_wrote_are_not_written_over(tmp_path):
    file = tmp_path / "run" / "train.yaml"
    save_settings(file.parent, {"model": "tiny", "learning_rate": 1e-5, "rewards": [{"text": None}]})
    refuse_own_settings(file, file.parent)
    written = file.read_text()
    for text in (f"# mine\n{written}", written.replace('"tiny"', "tiny"), 'output_dir: "/x/run"\n', ""):
        file.write_text(text)
        with pytest.raises(ValueError, match="train.yaml is where the run writes its own settings.*rename the file"):
            refuse_own_settings(file, file.parent)
        refuse_own_settings(file, tmp_path / "other")


def test_the_command_of_a_script():
    words = ["/home/me/my run.py", "--data", "/home/me/words.txt", "--hub_token", "hf_1", "--token=hf_2", "-v"]
    expected = "python 'my run.py' --data words.txt --hub_token ... --token=... -v"
    assert describe_script(words, 1) == expected
    for name in ("--api-key", "--api_key", "--WANDB_API_KEY", "--secret-access-key", "--password", "--client-secret"):
        shown = describe_script(["train.py", name, "sk-1", "--key", "name"], 1)
        assert shown == f"python train.py {name} ... --key name"
        assert describe_script(["train.py", f"{name}=sk-1"], 1) == f"python train.py {name}=..."
    assert describe_script(["train.py"], 4) == "accelerate launch --num_processes 4 train.py"
    assert describe_script(["train.py", "--url=http://me:pass@a", "http://b@c"], 1) == (
        "python train.py --url=http://a http://c"
    )
    for argv in ([], [""], ["/x/ipykernel_launcher.py", "-f"], ["/x/pytest/__main__.py"], ["/bin/pytest"], ["-c"]):
        assert describe_script(argv, 1) is None


def test_files_that_only_the_trainer_has_are_named():
    settings = {
        "dataset": "data/words.txt",
        "eval_dataset": "me/prompts",
        "reward_funcs": ["text", {"rewards.mine": 0.5}],
        "eval_reward_funcs": ["a.b.judge", "diffusion_grpo.rewards.builtin.brightness"],
    }
    assert list_local_files(settings) == ["data/words.txt", "rewards.py", "a/b.py"]
    assert list_local_files({"dataset": "tiny", "reward_funcs": ["text"]}) == []


def test_the_command_fetches_the_settings_where_they_are_published(tmp_path):
    save_settings(tmp_path, {"model": "tiny", "dataset": "words.txt", "reward_funcs": ["text"]})
    [_, local, files] = describe_reproduction(tmp_path, {}, None)
    assert "\ndiffusion-grpo train train.yaml\n" in local and "hf download" not in local and "`words.txt`" in files
    hub = describe_reproduction(tmp_path, {}, "me/mine")[1]
    assert "\nhf download me/mine train.yaml --local-dir mine\ndiffusion-grpo train mine/train.yaml\n" in hub


def test_a_run_from_python_names_its_script(tmp_path):
    assert "\npython train.py\n" in describe_reproduction(tmp_path, {"command": "python train.py"}, None)[1]
    assert describe_reproduction(tmp_path, {}, None) == ["It was started from Python; the settings are below."]


def test_processes_are_part_of_the_settings(monkeypatch):
    assert read_launch({"num_processes": None}, 1) == {} and read_launch({}, 2) == {"num_processes": 2}
    monkeypatch.setenv(LAUNCH_VARIABLE, json.dumps({"accelerate_config": "fsdp2", "num_processes": 2}))
    assert read_launch({"num_processes": None}, 2) == {"accelerate_config": "fsdp2", "num_processes": 2}
