"""Everything that the API pages document has a docstring with an example, and the examples run."""

import dataclasses
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import diffusion_grpo
from diffusion_grpo import tiny
from diffusion_grpo.algorithms import losses
from diffusion_grpo.policy import rollout

API = Path(__file__).parent.parent / "docs" / "api"
DOCUMENTED = re.findall(r"^::: ([\w.]+)", "".join(page.read_text() for page in sorted(API.glob("*.md"))), re.MULTILINE)
INPUTS = {"height": 32, "width": 96, "guidance_scale": 1.0, "max_sequence_length": 1}
WITHOUT_EXAMPLE = {"RankError"}  # it takes several processes
FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def find(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Exception)


@pytest.fixture(scope="module")
def names():
    """Return what the examples find defined, as the API pages say."""
    pipe = DiffusionPipeline.from_pretrained(tiny.PATH)
    pipe.set_progress_bar_config(disable=True)
    log_prob = torch.tensor([-0.5, -0.5], requires_grad=True)
    step = losses.LossInputs(
        log_prob=log_prob,
        old_log_prob=log_prob.detach(),
        advantages=torch.tensor([1.0, -1.0]),
        mean=torch.zeros(2, 4),
        std=torch.tensor(0.1),
        ref_mean=None,
        epsilon=1e-4,
        epsilon_high=1e-4,
        beta=0.0,
        noise=torch.full((2,), 0.1),
        jacobian=torch.ones(2),
        old_divergence=torch.zeros(2),
    )
    return {
        **{name: getattr(diffusion_grpo, name) for name in diffusion_grpo.__all__},
        **{name: getattr(rollout, name) for name in ("rollout", "replay", "run_prefix")},
        "torch": torch,
        "tiny": tiny,
        "pipe": pipe,
        "step": step,
        "inputs": {"prompt": ['the word "TEA" in red', 'the word "SUN" in blue'], **INPUTS},
        "images": [Image.new("RGB", (8, 8), shade) for shade in ("black", "white")],
        "NFT": diffusion_grpo.algorithms.NFT,
        **{name: getattr(diffusion_grpo.rewards, name) for name in ("score", "check_needs", "load_rewards")},
    }


@pytest.mark.parametrize("path", DOCUMENTED)
def test_examples_run(path, names, tmp_path):
    thing = find(path)
    tests = doctest.DocTestFinder(recurse=False).find(thing, path, globs={})
    examples = [example for test in tests for example in test.examples]
    assert bool(examples) != (thing.__name__ in WITHOUT_EXAMPLE), "an example, or none where none is due"
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    told = []
    for test in tests:
        test.globs = (
            vars(importlib.import_module(thing.__module__)) | names | {thing.__name__: thing, "folder": str(tmp_path)}
        )
        runner.run(test, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_arguments_are_explained(path):
    """Every argument of a public function or class is named in its docstring, or that of the one it refers to."""
    thing = find(path)
    text = inspect.getdoc(thing) or ""
    assert text and text[0].isupper(), path
    if is_error(thing) or "rguments as in" in text:
        return
    named = set(re.findall(r"\w+", text))
    for base in thing.__mro__ if inspect.isclass(thing) else ():
        named |= set(re.findall(r"\w+", base.__doc__ or "")) if dataclasses.is_dataclass(thing) else set()
    explained = {name for name, own in inspect.signature(thing).parameters.items() if own.kind not in (2, 4)}
    if inspect.isclass(thing) and issubclass(thing, diffusion_grpo.DiffusionGRPOConfig):
        return  # each field has a help text
    assert explained <= named, path
