"""The wheel is the whole library: built, installed into a fresh environment, and used outside the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import diffusion_grpo

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "model": "tiny",
    "dataset": "tiny",
    "output_dir": "run",
    "reward_funcs": ["color"],
    "use_peft": True,
    "lora_r": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "num_inference_steps": 2,
    "max_steps": 1,
    "height": 32,
    "width": 96,
    "pipeline_kwargs": {"max_sequence_length": 1},
    "eval_dataset": "tiny",
    "eval_max_prompts": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_on_start": True,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}


def call(*words, **options):
    """Run a command and return what it printed; fail with its messages."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what is published: a build leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "diffusion_grpo", source / "diffusion_grpo", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", target]
    call(sys.executable, "-m", "pip", "wheel", *words, source)
    [path] = target.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "diffusion_grpo").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert names == {str(path.relative_to(ROOT)) for path in files}
    assert {"diffusion_grpo/py.typed", "diffusion_grpo/run/report.js"} <= names


def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(path).decode()
    assert f"Version: {diffusion_grpo.__version__}" in metadata and "License: Apache-2.0" in metadata
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == diffusion_grpo.__version__ and citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the folder of a fresh environment with the wheel, and how to run its programs elsewhere."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # what it depends on comes from this environment, whose own copy of the package lies after the fresh one
    [site] = folder.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"])
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return folder, {"cwd": tmp_path_factory.mktemp("work"), "env": variables}


def test_the_installed_wheel_is_what_runs(installed):
    folder, options = installed
    where = call(folder / "bin" / "python", "-c", "from diffusion_grpo import tiny; print(tiny.PATH)", **options)
    assert Path(where.strip()).is_relative_to(folder) and (Path(where.strip()) / "model_index.json").is_file()
    assert "sde_window_size" in call(folder / "bin" / "diffusion-grpo", "train", "--list-settings", **options)


@pytest.mark.slow
def test_the_installed_wheel_trains(installed):
    folder, options = installed
    (options["cwd"] / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    call(folder / "bin" / "diffusion-grpo", "train", "settings.yaml", **options)
    made = {path.name for path in (options["cwd"] / "run").iterdir()}
    assert {"pytorch_lora_weights.safetensors", "report.html", "README.md", "train.yaml", "summary.json"} <= made
