"""The examples: files of settings, scripts and prompts that belong together.

`test_systems.py` runs those of large models on tiny pipelines of the same classes.
"""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from diffusers import UniPCMultistepScheduler
from tiny_runs import train_and_compare, trainer_for

from diffusion_grpo import DiffusionGRPOTrainer, tiny
from diffusion_grpo.config.parse import parse_train_arguments, read_yaml
from diffusion_grpo.data.held_out import count_prompts
from diffusion_grpo.data.prompts import load_prompts
from diffusion_grpo.planning.batches import count_evaluations
from diffusion_grpo.policy.schedulers import stochastic_scheduler
from diffusion_grpo.rewards import REWARDS, load_rewards

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
FILES = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml"))


def test_the_script_that_reads_any_file_is_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(DiffusionGRPOTrainer, "train", lambda trainer, **arguments: None)
    words = [str(EXAMPLES / "demo.yaml"), "--output_dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    trainer = runpy.run_path(str(EXAMPLES / "train.py"))["trainer"]
    script, lora, args = parse_train_arguments(words[0], words[1:])
    for name in ("learning_rate", "target_change"):  # the trainer fills them in
        setattr(args, name, getattr(trainer.args, name))
    assert trainer.args.to_dict() == args.to_dict()
    assert trainer.run["reward_funcs"] == script.reward_funcs and trainer.run["trains_by"] == "LoRA rank 16"
    assert trainer.run["eval_reward_funcs"] == script.eval_reward_funcs
    assert trainer.eval_dataset["prompt"] == tiny.prompts("test")["prompt"][: script.eval_max_prompts]
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all(any(module in name for name in trained) for module in lora.lora_target_modules)


@pytest.mark.parametrize("file", FILES)
def test_every_file_of_settings_is_accepted(file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    on_cpu = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--fp16", "false"]
    script, _, args = parse_train_arguments(str(EXAMPLES / file), on_cpu)
    assert script.reward_funcs and args.eval_on_start and args.max_steps >= 2 * args.eval_steps
    if args.warmup_steps:
        assert args.lr_scheduler_type != "constant"  # which has no warm-up


@pytest.mark.parametrize("name", sorted(path.stem for path in (EXAMPLES / "fast").glob("*.yaml")))
def test_fast_examples_say_what_they_save(name, tmp_path, monkeypatch):
    """Passes per sample of both files, as `plan` counts them: each step is one pass, or two with guidance."""
    monkeypatch.chdir(ROOT)
    text = (EXAMPLES / "fast" / f"{name}.yaml").read_text()
    usual, few, many = re.search(r"\.\./(\w+)\.yaml .*?about ([\d.]+) per sample instead of (\d+)", text).groups()
    for file, said in ((f"fast/{name}.yaml", few), (f"{usual}.yaml", many)):
        on_cpu = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--fp16", "false", "--bf16", "false"]
        *_, args = parse_train_arguments(str(EXAMPLES / file), on_cpu)
        passes = count_evaluations(args)
        trained = (args.best_of_n or args.num_generations) / args.num_generations
        cost = passes["rollout"] + 3 * trained * passes["update, with gradient"]
        cost += passes.get("reference in the update", 0)
        is_embedded = name in ("flux", "flux_kontext", "hunyuan_video")
        scale = args.pipeline_kwargs.get("true_cfg_scale") if args.pipeline_kwargs else None
        is_guided = not is_embedded and (scale or args.guidance_scale) != 1
        assert cost * (2 if is_guided else 1) == pytest.approx(float(said), rel=0.05), file


def test_the_fast_file_of_two_experts_trains_each_as_often():
    """The pipeline hands steps from timestep 875 on to the first expert (`boundary_ratio` of Wan 2.2 A14B)."""
    values = read_yaml(str(EXAMPLES / "fast" / "wan22_a14b.yaml"))
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, **values["scheduler_kwargs"]}
    scheduler = stochastic_scheduler(UniPCMultistepScheduler(**flow), values["sde_type"])
    scheduler.set_timesteps(values["num_inference_steps"])
    trained = scheduler.timesteps[slice(*values["trained_steps"])]
    assert (trained >= 875).tolist() == [True] * 3 + [False] * 3 and values["num_trained_steps"] == 1


@pytest.mark.parametrize("file", FILES)
def test_examples_are_evaluated_on_prompts_that_they_are_not_trained_on(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    values = read_yaml(f"examples/{file}")
    train = load_prompts(values["dataset"], "train")
    held_out = load_prompts(values["eval_dataset"], "test")
    assert count_prompts(train, held_out)["eval_in_train"] == 0, file
    assert len(set(held_out["prompt"])) >= 3
    for column in {"image", "target"} & set(train.column_names):  # what is edited is new too
        assert not set(train[column]) & set(held_out[column]), file
    assert set(train.column_names) == set(held_out.column_names)


def test_scripts_are_evaluated_on_held_out_prompts():
    for path in EXAMPLES.glob("*.py"):
        [*trained], [*held_out] = (
            [line for line in path.read_text().splitlines() if f"{name}_dataset=" in line]
            for name in ("train", "eval")
        )
        for mine, others in zip(trained, held_out, strict=True):
            assert mine.split("=", 1)[1] != others.split("=", 1)[1] and ("data/" not in others or "_test" in others)


def test_the_algorithm_of_ones_own_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = {key: read_yaml("examples/own_algorithm.yaml")[key] for key in ("loss_type", "loss_kwargs")}
    trainer = trainer_for(tmp_path, **settings, max_steps=2)
    assert train_and_compare(trainer)
    updates = [entry for entry in trainer.state.log_history if "reinforce/drift" in entry]
    assert len(updates) == 2 and all(entry["reinforce/drift"] == 0.0 for entry in updates)


def test_rewards_on_servers_are_what_the_files_say():
    remote, color = load_rewards(read_yaml(str(EXAMPLES / "remote_reward.yaml"))["reward_funcs"])
    assert (remote.name, remote.weight, color.name) == ("text", 0.7, "color")
    assert isinstance(remote.function, REWARDS["remote"]) and remote.function.reward == "text"
    judge, colorfulness = load_rewards(read_yaml(str(EXAMPLES / "vlm_judge.yaml"))["reward_funcs"])
    assert isinstance(judge.function, REWARDS["vlm_judge"]) and colorfulness.weight == 0.005


@pytest.mark.plots
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    small = {
        "UPDATES = 8": "UPDATES = 2",
        "n=12": "n=2",
        "num_generations=8": "num_generations=2",
        "per_device_train_batch_size=32": "per_device_train_batch_size=2",
    }
    assert all(any(old in source for source in code) for old in small)
    names: dict = {}
    for source in code:
        for old, new in small.items():
            source = source.replace(old, new)
        exec(compile(source, "quickstart.ipynb", "exec"), names)
    assert [entry["step"] for entry in names["evaluations"]] == [0, 1, 2]
    assert names["sample"](names["fresh"]).tobytes() == names["after"].tobytes() != names["before"].tobytes()
    assert (tmp_path / "outputs" / "quickstart" / "report.html").is_file()
