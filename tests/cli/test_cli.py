"""The command line: what is refused, before a model is loaded, and what the four commands leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict

import diffusers
import pyarrow.parquet
import pytest
import torch
import yaml
from peft import get_peft_model
from tiny_pipelines import build

from diffusion_grpo import __version__, cli
from diffusion_grpo.cli.train import finish_run
from diffusion_grpo.config.parse import Yaml12Loader, parse_train_arguments, read_overrides
from tests.run.test_report import make_run


@pytest.fixture
def config(tmp_path):
    """A YAML file of a run on a small prompt file; returns a function that changes keys and gives the path."""
    (tmp_path / "prompts.txt").write_text("a red fox\na blue house\n")
    settings = {
        "model": "nobody/nothing",
        "dataset": str(tmp_path / "prompts.txt"),
        "reward_funcs": ["brightness"],
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
    }

    def write(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**settings, **changes}))
        return str(path)

    return write


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test where a model is loaded."""

    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the refusal")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", fail)


def refusal(capsys, *words):
    """The one line with which a command line is refused."""
    assert cli.main(list(words)) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line and not line.startswith("Generating")]  # datasets' bar
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_help_does_not_wait_for_torch():
    code = "import sys; from diffusion_grpo.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


TYPING_ERRORS = [  # what is changed in a good file, and the words
    ({"learning_rat": 1e-3}, "train FILE"),
    ({"num_generations": 3}, "train FILE"),
    ({"num_generations": "many"}, "train FILE"),
    ({"use_peft": "maybe"}, "train FILE"),
    ({"loss_type": "grop"}, "train FILE"),
    ({"dataset": "missing.txt"}, "train FILE"),
    ({"reward_funcs": ["brigthness"]}, "train FILE"),
    ({"model": "./nothing"}, "train FILE"),
    ({"lora_dropout": 0.1}, "train FILE"),
    ({"accelerate_config": "zero33"}, "train FILE"),
    ({"num_processes": 2, "num_generations": 3}, "train FILE"),
    ({}, "train missing.yaml"),
    ({}, "train FILE --bta 0.1"),
    ({"num_generations": 3}, "plan FILE"),
    ({}, "plan FILE --accelerate_config zero33"),
    ({}, "sample tiny --prompts missing.txt"),
    ({}, "sample tiny --prompts tiny --reward_funcs nothing"),
    ({"sde_type": "flow"}, "sample FILE"),
    ({}, "check tiny --sde_type flow"),
    ({}, "rewards verify nothing"),
    ({}, "rewards serve nothing"),
]


def test_typing_errors_are_refused_before_anything_heavy_is_imported(config, tmp_path):
    cases = []
    for number, (changes, words) in enumerate(TYPING_ERRORS):
        path = tmp_path / f"{number}.yaml"
        path.write_text(open(config(**changes)).read())
        cases.append(words.replace("FILE", str(path)).split())
    code = (
        "import sys; from diffusion_grpo import cli; print([cli.main(words) for words in CASES]); "
        "print([name for name in ('torch', 'transformers', 'diffusers', 'datasets', 'numpy') if name in sys.modules])"
    ).replace("CASES", repr(cases))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [str([2] * len(cases)), "[]"]
    lines = result.stderr.splitlines()
    assert len(lines) == len(cases) and all(line.startswith("error: ") for line in lines)


def test_config_errors_in_python_do_not_wait_for_diffusers():
    code = (
        "import sys\nfrom diffusion_grpo import DiffusionGRPOConfig\n"
        "try:\n    DiffusionGRPOConfig('out', num_generations=1)\nexcept ValueError as error:\n    print(error)\n"
        "print('diffusers' in sys.modules, 'datasets' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "num_generations must be at least 2" in result.stdout and result.stdout.endswith("False False\n")


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0 and capsys.readouterr().out == f"diffusion-grpo {__version__}\n"


@pytest.mark.parametrize(
    "command", [[], ["train"], ["plan"], ["check"], ["sample"], ["report"], ["rewards"], ["rewards", "serve"]]
)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command, "--help"])
    assert exit_info.value.code == 0
    assert "usage: diffusion-grpo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"learning_rat": 1e-3}, ["`learning_rat`", "`learning_rate`"]),
        ({"num_generations": 1}, ["num_generations", "at least 2"]),
        ({"num_generations": 3}, ["num_generations=3", "divide"]),
        ({"num_generations": "many"}, ["`num_generations`", "invalid int"]),
        ({"num_generations": None}, ["`num_generations` is None"]),
        ({"num_generations": [2, 3]}, ["`num_generations` is [2, 3]"]),
        ({"sde_window": [3, 12]}, ["sde_window=[3, 12]"]),
        ({"sde_type": "flow"}, ["sde_type='flow'", "flow_sde", "dance_sde"]),
        ({"loss_type": "grop"}, ["'grop'", "grpo"]),
        ({"reward_funcs": ["brigthness"]}, ["'brigthness'", "'brightness'", "jpeg_compressibility"]),
        ({"reward_funcs": ["no_such_module.reward"]}, ["no_such_module.reward"]),
        ({"eval_reward_funcs": ["tessract"]}, ["'tessract'", "'tesseract'"]),
        ({"reward_funcs": {"brightness": {"wieght": 1}}}, ["'wieght'", "'weight'"]),
        ({"reward_funcs": [{"brightness": "much"}]}, ["'much'", "weight"]),
        ({"reward_funcs": {"ssim": {"target_column": "goal"}}}, ["'ssim'", "'goal'", "prompt"]),
        ({"eval_reward_funcs": {"remote": {"url": "here"}}}, ["http://host:port"]),
        ({"lora_dropout": 0.05}, ["lora_dropout", "0"]),
        ({"lora_r": 0}, ["lora_r"]),
        ({"dataset": "missing.txt"}, ["missing.txt"]),
        ({"eval_max_prompts": 0}, ["eval_max_prompts"]),
        ({"baseline_guidance_scales": [2.0]}, ["baseline_guidance_scales", "eval_dataset"]),
        ({"report_experiment": "missing.json"}, ["report_experiment", "missing.json"]),
        ({"model": "./no/such/folder"}, ["./no/such/folder"]),
        ({"model": "tyni"}, ["tyni"]),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(changes, expected, config, no_model, capsys):
    line = refusal(capsys, "train", config(**changes))
    assert all(part in line for part in expected), line


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", "\n\n", ["dataset", "empty"]),
        ("columns.jsonl", '{"text": "a cat"}\n', ["dataset", "prompt", "text"]),
        ("numbers.jsonl", '{"prompt": 1}\n{"prompt": 2}\n', ["dataset", "row 0"]),
    ],
)
def test_bad_prompts_are_refused_before_a_model_is_loaded(
    name, content, expected, config, no_model, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_text(content)
    line = refusal(capsys, "train", config(dataset=str(tmp_path / name)))
    assert all(part in line for part in expected), line


def test_files_that_are_no_settings_are_refused(tmp_path, no_model, capsys):
    assert "no file" in refusal(capsys, "train", str(tmp_path / "missing.yaml"))
    for content, expected in (("a: [1, 2", "not YAML"), ("- a\n- b\n", "list")):
        (tmp_path / "config.yaml").write_text(content)
        assert expected in refusal(capsys, "train", str(tmp_path / "config.yaml"))
    assert "`model`, `dataset`, `reward_funcs`" in refusal(capsys, "train")


def test_flags_are_checked_like_keys(config, no_model, capsys):
    assert "`beta`" in refusal(capsys, "train", config(), "--bta", "0.1")
    assert "stands alone" in refusal(capsys, "train", config(), "0.1")
    assert "`reward_funcs` is True" in refusal(capsys, "train", config(), "--reward_funcs")
    assert "no_such" in refusal(capsys, "train", config(), "--reward_funcs", "no_such")


def test_a_folder_that_holds_a_run_is_refused(config, no_model, capsys, tmp_path):
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    assert "checkpoint-5" in refusal(capsys, "train", config())


def test_overrides_win_over_the_file(config):
    words = ["--beta", "0.1", "--sde_window", "1", "3", "--advantage-clip", "null", "--reward_funcs", "text", "color"]
    script, lora, settings = parse_train_arguments(
        config(beta=0.5, pipeline_kwargs={"a": 1}), [*words, "--use_peft", "--pipeline_kwargs", '{"b": 1e-3}']
    )
    assert settings.beta == 0.1
    assert settings.sde_window == [1, 3]
    assert settings.advantage_clip is None
    assert settings.pipeline_kwargs == {"b": 0.001}
    assert script.reward_funcs == ["text", "color"]
    assert lora.use_peft


def test_rewards_with_options_come_from_yaml_and_from_flags(config):
    from diffusion_grpo.rewards import load_rewards

    wanted = [("text", 0.6, {"match": "exact"}), ("brightness", 0.5, {})]
    for value in (
        {"text": {"weight": 0.6, "match": "exact"}, "brightness": 0.5},
        [{"text": {"weight": 0.6, "match": "exact"}}, {"brightness": 0.5}],
    ):
        script = parse_train_arguments(config(reward_funcs=value), [])[0]
        found = [(reward.name, reward.weight, reward.arguments) for reward in load_rewards(script.reward_funcs)]
        assert sorted(found, reverse=True) == wanted  # the file's keys are sorted
    words = ["--reward_funcs", "{text: {weight: 0.6, match: exact}, brightness: 0.5}"]
    script = parse_train_arguments(config(), words)[0]
    found = [(reward.name, reward.weight, reward.arguments) for reward in load_rewards(script.reward_funcs)]
    assert found == wanted


def test_yaml_reads_no_as_a_word_and_1e_3_as_a_number(tmp_path, config):
    values = yaml.load("a: no\nb: 1e-3\nc: 12\nd: -.5\ne: true\nf: null\ng: 1.2.3", Yaml12Loader)
    assert values == {"a": "no", "b": 0.001, "c": 12, "d": -0.5, "e": True, "f": None, "g": "1.2.3"}
    assert isinstance(values["c"], int)
    path = config()
    with open(path, "a") as file:
        file.write("eval_strategy: no\nlearning_rate: 1e-3\n")
    settings = parse_train_arguments(path, [])[2]
    assert settings.eval_strategy == "no" and settings.learning_rate == 1e-3


def test_overrides_are_grouped_by_key():
    assert read_overrides(["--a", "1", "2", "--b=x=y", "--c", "--d", "null", "--e-f", "-1"]) == {
        "a": ["1", "2"],
        "b": "x=y",
        "c": True,
        "d": None,
        "e_f": "-1",
    }


def test_lora_arguments_become_a_peft_config(config):
    lora = parse_train_arguments(config(use_peft=True, lora_r=4, lora_target_modules=["to_q", "to_k"]), [])[1]
    assert (lora.peft_config().r, lora.peft_config().target_modules) == (4, {"to_q", "to_k"})
    lora = parse_train_arguments(config(use_peft=True, lora_target_modules=[r".*attn\.to_q"]), [])[1]
    assert lora.peft_config().target_modules == r".*attn\.to_q"
    assert parse_train_arguments(config(), [])[1].peft_config() is None


def test_how_a_lora_starts(config):
    given = {"use_peft": True, "lora_target_modules": ["to_q", "to_k"]}
    inits = [parse_train_arguments(config(**given, lora_init=name), [])[1] for name in ("kaiming", "gaussian")]
    assert [lora.peft_config().init_lora_weights for lora in inits] == [True, "gaussian"]
    spreads = []
    for lora in inits:
        torch.manual_seed(0)
        model = get_peft_model(torch.nn.Sequential(OrderedDict(to_q=torch.nn.Linear(64, 64))), lora.peft_config())
        first, second = (getattr(model.base_model.model.to_q, name)["default"].weight for name in ("lora_A", "lora_B"))
        assert second.eq(0).all()
        spreads.append(first.std().item())
    assert spreads == pytest.approx([(3 * 64) ** -0.5, 1 / 16], rel=0.1)
    with pytest.raises(ValueError, match="lora_init is 'gauss'; choose one of kaiming, gaussian"):
        parse_train_arguments(config(use_peft=True, lora_init="gauss"), [])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    build("sd3")[0].save_pretrained(folder)
    return str(folder)


SIZE = {"height": 16, "width": 16, "num_inference_steps": 3}


def flags(**options):
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.mark.plots
def test_train_leaves_a_whole_run_folder(config, model, tmp_path, capsys):
    path = config(
        model=model,
        eval_dataset=str(tmp_path / "prompts.txt"),
        eval_reward_funcs=["jpeg_compressibility"],
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
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
    assert (
        summary["updates"] == 2
        and summary["evaluation_prompts"] == 2
        and summary["evaluation_prompts_in_training"] == 2
    )
    assert set(summary["rewards"]) == {"brightness", "jpeg_compressibility"}
    baseline = json.loads((run / "baselines.json").read_text())[0]
    assert baseline["name"] == "guidance 2" and set(baseline["rewards"]) == set(summary["rewards"])
    assert "guidance 2" in (run / "report.html").read_text()
    assert str(run / "summary.json") in capsys.readouterr().out


def interrupting(images, trainer_state, **columns):
    """A reward during which somebody presses Ctrl-C, once there is a checkpoint."""
    if trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    return [0.0] * len(images)


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_says_in_one_line_how_to_go_on(config, model, tmp_path, capsys, saves):
    path = config(
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
    how = (
        f"go on from {newest} with resume_from_checkpoint=True"
        if saves
        else "there is no checkpoint yet, so start it again as it was"
    )
    assert last == f"Interrupted after 1 update; {how}."
    assert "Traceback" not in last


def test_sample_writes_pictures_and_rewards(model, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a red fox\na blue house\na tree\n")
    words = ["sample", model, "--prompts", str(tmp_path / "prompts.txt"), "--reward_funcs", "brightness"]
    options = {**SIZE, "guidance_scale": 1.0, "max_prompts": 2, "pipeline_kwargs": '{"max_sequence_length": 8}'}
    for batch_size in (1, 2):
        folder = str(tmp_path / f"batch{batch_size}")
        assert cli.main([*words, *flags(output_dir=folder, batch_size=batch_size, **options)]) == 0
    tables = [pyarrow.parquet.read_table(tmp_path / f"batch{size}" / "samples.parquet").to_pylist() for size in (1, 2)]
    assert [row["prompt"] for row in tables[0]] == ["a red fox", "a blue house"]
    assert (tmp_path / "batch1" / "0001.png").is_file()
    assert [row["brightness"] for row in tables[0]] == pytest.approx(
        [row["brightness"] for row in tables[1]], abs=0.01
    )
    assert "brightness" in capsys.readouterr().out


def test_sample_refuses_what_it_cannot_use(model, tmp_path, capsys, no_model):
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    assert "unknown" in refusal(capsys, "sample", model, *prompts, "--reward_funcs", "nothing").lower()
    assert "JSON" in refusal(capsys, "sample", model, *prompts, "--pipeline_kwargs", "[1]")
    assert "float33" in refusal(capsys, "sample", model, *prompts, "--dtype", "float33")
    assert "no device of torch" in refusal(capsys, "sample", model, *prompts, "--device", "cdua")
    assert "model_index.json" in refusal(capsys, "sample", str(tmp_path), *prompts)


def test_check_prints_the_replay_report(model, capsys):
    assert cli.main(["check", model, *flags(**SIZE, pipeline_kwargs='{"max_sequence_length": 8}')]) == 0
    printed = capsys.readouterr().out
    assert "max_ratio_error" in printed and "StableDiffusion3Pipeline" in printed


def test_report_writes_the_page_again(tmp_path, capsys):
    run = make_run(tmp_path / "run", updates=2, eval_every=1, prompts=2)
    assert cli.main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert (run / "summary.json").is_file()
    assert "run.json" in refusal(capsys, "report", str(tmp_path))


def test_the_terminal_names_no_path_that_does_not_exist(tmp_path, capsys):
    run = make_run(tmp_path / "run", updates=2, eval_every=1, prompts=2)
    finish_run(run, None)
    printed = capsys.readouterr().out
    assert f"Evaluations: {run / 'evaluations'}" in printed and "Samples:" not in printed
    assert "text             0.400 ± 0.030 before training, 0.900 ± 0.030 after 2 updates" in printed
