"""The wheel is the whole library: built, installed into a fresh environment, and used outside the repository."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import diffusion_grpo

ROOT = Path(__file__).parent.parent
# modules that only an extra's packages can import
WITH_EXTRAS = {"diffusion_grpo.rewards.server.serve", "diffusion_grpo.report.plots"}
IMPORT_ALL = """
import importlib, pkgutil, diffusion_grpo
failed = []
for module in pkgutil.walk_packages(diffusion_grpo.__path__, "diffusion_grpo."):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except ImportError:
        failed.append(module.name)
print(*failed)
print(diffusion_grpo.tiny.PATH)
"""


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
    assert {"diffusion_grpo/py.typed", "diffusion_grpo/report/page.js"} <= names


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
    """Return the folder of an environment with the wheel and what it requires, and how to run programs elsewhere."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    call(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps", wheel)
    [site] = folder.glob("lib/python*/site-packages")
    for distribution in required({Requirement("diffusion-grpo")}, metadata.distributions(path=[str(site)])):
        for name in {file.parts[0] for file in distribution.files} - {".."}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return folder, {"cwd": tmp_path_factory.mktemp("work"), "env": variables}


def required(requirements, wheels):
    """Distributions of this environment that the wheel requires, without its extras."""
    own, distributions = {each.name: each for each in wheels}, {}
    while requirements:
        requirement = requirements.pop()
        name, extras = canonicalize_name(requirement.name), {"", *requirement.extras}
        if extras <= distributions.get(name, (None, set()))[1]:
            continue
        distribution = own.get(name) or metadata.distribution(name)
        distributions[name] = distribution, extras
        for needed in map(Requirement, distribution.requires or ()):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                requirements.add(needed)
    return [distribution for name, (distribution, _) in distributions.items() if name not in own]


def test_the_installed_program_runs(installed):
    folder, options = installed
    assert diffusion_grpo.__version__ in call(folder / "bin" / "diffusion-grpo", "--version", **options)


def test_without_an_extra_every_module_imports_and_the_first_script_trains(installed):
    folder, options = installed
    script = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = re.sub(r"\b((max|eval)_steps=|n=)\d+", r"\g<1>1", script)
    assert "max_steps=1," in script and "n=1)" in script
    (options["cwd"] / "script.py").write_text(IMPORT_ALL + script)
    printed = call(folder / "bin" / "python", "script.py", **options)
    failed, place = printed.splitlines()[:2]
    assert set(failed.split()) == WITH_EXTRAS
    assert Path(place).is_relative_to(folder) and (Path(place) / "model_index.json").is_file()
    assert (options["cwd"] / "bold" / "pytorch_lora_weights.safetensors").is_file()
