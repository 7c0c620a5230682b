"""What a page tells a reader to type works: Python runs on tiny pipelines, YAML and command lines are parsed for real.

The examples of docs/data.md run in `tests/data/test_data_page.py`; those of docstrings in `tests/test_docstrings.py`.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import tiny_pipelines
from diffusers import DiffusionPipeline
from run_folders import make_run
from tiny_runs import SETTINGS, logged

import diffusion_grpo
from diffusion_grpo import DiffusionGRPOConfig, tiny
from diffusion_grpo.cli import build_parser, split_overrides
from diffusion_grpo.config.fields import list_fields, read_value, script_fields
from diffusion_grpo.config.parse import parse_train_arguments, read_overrides
from diffusion_grpo.policy.sde import SDES
from diffusion_grpo.report.page import write_report
from diffusion_grpo.rewards import REWARDS, load_rewards

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
# tiny pipelines of the classes that the pages name
PIPELINES = {
    "stabilityai/stable-diffusion-3.5-medium": "sd3",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "sd15",
}
TINY = {**SETTINGS, "num_generations": 2, "num_inference_steps": 3, "max_steps": 1}
SHORT = {"num_generations": 4, "gradient_accumulation_steps": 1, "max_steps": 1, "eval_strategy": "no"}
SHORT |= {"eval_on_start": False, "disable_tqdm": True}
RUN_ELSEWHERE = {"docs/data.md"}
# load models of the Hub, or read the folders of two runs
COMPILED_ONLY = {"docs/models/glm_image.md", "docs/models/modular.md"}
PROMPTS = 'the word "TEA" in red\nthe word "SUN" in blue\n'
# modules that the pages take for the reader's own
OWN = {
    "my_rewards": "def brightness(images, **columns): ...",
    "my_module": "def sharpness(images, weight=1.0, **columns): ...",
}


def find_blocks(*languages):
    """Yield the page, the line and the text of each block in one of the languages, of equal ones only the first."""
    seen = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if block[1] in languages and block[2] not in seen:
                seen.add(block[2])
                place = f"{page.relative_to(ROOT)}:{text[: block.start()].count(chr(10)) + 1}"
                yield pytest.param(page.relative_to(ROOT).as_posix(), block[2], id=place)


def find_commands():
    """Yield each command line of the program, in blocks and in the text."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = "\n".join(block[2] for block in BLOCK.finditer(text) if block[1] in ("", "bash")).replace("\\\n", " ")
        found = [line[line.index("diffusion-grpo ") :] for line in lines.splitlines() if "diffusion-grpo " in line]
        found += [span for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text)) if span.startswith("diffusion-grpo ")]
        for command in dict.fromkeys(" ".join(line.split()) for line in found):
            yield pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}"[:120])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working directory with the files that the pages name."""
    for name in ("prompts.txt", "held_out.txt"):
        (tmp_path / name).write_text(PROMPTS)
    for name, text in OWN.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def names():
    """Return what pages take for given: a pipeline, and functions that they name without writing them."""
    pipe = DiffusionPipeline.from_pretrained(tiny.PATH)
    pipe.set_progress_bar_config(disable=True)
    return {"pipe": pipe, "judge": lambda a, b, prompt: 0.5}


@pytest.mark.parametrize(("page", "code"), find_blocks("python"))
def test_python_runs(page, code, names, folder, monkeypatch):
    compiled = compile(code, page, "exec")
    if page in RUN_ELSEWHERE or page in COMPILED_ONLY:
        return
    real, made = diffusion_grpo.DiffusionGRPOTrainer, []

    def build_trainer(model, **rest):
        if model != "tiny" and rest.get("args"):
            rest["args"].model_init_kwargs = None  # the stand-in is in memory
        monkeypatch.setattr(real, "push_to_hub", lambda self, **kwargs: None)
        made.append(real(model if model == "tiny" else tiny_pipelines.build(PIPELINES[model])[0], **rest))
        return made[-1]

    def build_settings(output_dir, **settings):
        if "tiny" in code:
            return DiffusionGRPOConfig(output_dir, **{**settings, **SHORT})
        settings = {name: value for name, value in settings.items() if name not in ("height", "width")}
        return DiffusionGRPOConfig(output_dir, **{**settings, **TINY})

    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOTrainer", build_trainer)
    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOConfig", build_settings)
    monkeypatch.setattr("diffusion_grpo.policy.sde.SDES", dict(SDES))
    if page == "docs/quickstart.md" and "check_pipeline" in code:
        code = code.replace("512", "32")  # what the embedded model can make on a CPU
        compiled = compile(code.replace('"width": 32', '"width": 96, "max_sequence_length": 1'), page, "exec")
    exec(compiled, dict(names))
    for trainer in made:
        assert (logged(trainer, "ratio/max_error") or logged(trainer, "prediction/max_error"))[0] == 0.0


def test_the_worked_example_prints_what_the_page_says(capsys):
    code, printed = (block[2] for block in BLOCK.finditer((ROOT / "docs" / "worked_example.md").read_text()))
    exec(compile(code, "docs/worked_example.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("page", "text"), find_blocks("yaml"))
def test_yaml_is_a_run(page, text, folder):
    """Each part between blank lines, with what a run needs besides, is parsed as `diffusion-grpo train` does."""
    given = {"model": "a/model", "dataset": "prompts.txt", "reward_funcs": "brightness", "output_dir": "out"}
    for part in text.split("\n\n"):
        keys = set(re.findall(r"^(\w+):", part, flags=re.MULTILINE))
        assert keys, part
        rest = "".join(f"{key}: {value}\n" for key, value in given.items() if key not in keys)
        (folder / "run.yaml").write_text(rest + part)
        (folder / "my_package").mkdir(exist_ok=True)
        (folder / "my_package" / "my_losses.py").write_text("def soft_clip(inputs, *, sharpness=1.0): ...")
        script, _, _ = parse_train_arguments("run.yaml", ["--use_cpu", "true"])
        load_rewards(script.reward_funcs)
        load_rewards(script.eval_reward_funcs)


@pytest.mark.parametrize("command", find_commands())
def test_command_is_parsed(command):
    if command.count("'") % 2:  # the inside of a quoted command in a shell script
        command = command.replace("'", "")
    words = [word for word in shlex.split(command, comments=True)[1:] if word != "..."]
    is_name_alone = words in (["plan"], ["report"], ["sample"], ["check"], ["train"])
    if is_name_alone or words[0] in ("COMMAND", "--traceback", "--version") or "--help" in words:
        return
    own, overrides = split_overrides(words)
    arguments, unknown = build_parser().parse_known_args(own)
    assert not unknown or arguments.command in ("sample", "plan")
    known = {**script_fields(), **list_fields(DiffusionGRPOConfig)}
    known |= dict.fromkeys(("accelerate_config", "num_processes", "num_machines", "machine_rank"))
    known |= dict.fromkeys(("main_process_ip", "main_process_port", "key"))
    for key, value in read_overrides([*overrides, *unknown]).items():
        assert key in known, key
        if known[key] is not None and "$" not in str(value):
            read_value(value, known[key])
    for word in words:
        if word.startswith("examples/") and word.endswith(".yaml"):
            assert (ROOT / word).is_file() or word == "examples/NAME.yaml"


@pytest.mark.parametrize(("page", "text"), find_blocks("json"))
def test_json_is_an_experiment_that_the_report_shows(page, text, tmp_path):
    (tmp_path / "experiment.json").write_text(text, encoding="utf-8")
    report = write_report(make_run(tmp_path / "run"), tmp_path / "experiment.json").read_text(encoding="utf-8")
    given = json.loads(text)
    names = [given["title"], given["note"], given["command"], given["machine"], *given["columns"]]
    assert all(name in report for name in names), page
    assert all(row["name"] in report and len(row["values"]) == len(given["columns"]) for row in given["rows"]), page


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "coming_from").glob("*.md")), ids=lambda page: page.stem)
def test_settings_that_tables_translate_into_exist(page):
    """The second column of the tables: `key: value` and plain names are settings of a run, or a file's columns."""
    known = {*script_fields(), *list_fields(DiffusionGRPOConfig), "prompt", "negative_prompt"}
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*?\| (.*?) \|.*\|$", text, flags=re.MULTILINE)
    settings = [span for row in rows for span in re.findall(r"`(\w+)(?:: [^`]*)?`", row)]
    assert settings
    assert set(settings) <= known | set(REWARDS) | {"peft_config"}, page
