"""How a pipeline takes several samples is found out from what it makes of them; real ones are in `test_inputs.py`."""

from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.data.call_form import find_form
from diffusion_grpo.data.inputs import Form
from diffusion_grpo.policy.base import Policy
from diffusion_grpo.policy.trajectory import sample_seed

COUNT = 3


class Fake(Policy):
    """A policy whose latents are a function of the inputs."""

    default_noise_level = 1.0

    def __init__(self, make_latents):
        self.make_latents, self.cleared = make_latents, 0
        self.prompts = SimpleNamespace(clear=self.clear, kept=None)

    def clear(self):
        self.cleared += 1

    def rollout(self, inputs, request):
        assert list(request.steps) == [[0]] * len(request.seeds) and not request.is_complete
        return None, SimpleNamespace(next_latents=self.make_latents(inputs["x"], request.initial_seeds))

    def replay(self, *args):
        raise AssertionError

    def check_noise_level(self, noise_level):
        pass

    check_latents = run_prefix = replay


def give(rows, form):
    """Turn rows into arguments, as `PipelineInputs` does."""
    values = [row["x"] for row in rows]
    return {"x": values[0] if form == "single" else values}


def find(make_latents):
    policy = Fake(make_latents)
    form = find_form(policy, {"x": torch.tensor(0.25)}, give, COUNT, steps=[0], num_inference_steps=2)
    assert policy.cleared >= 4  # nothing of the search is remembered: before and after each of two rollouts
    return form


def test_an_input_that_is_ignored_everywhere_is_no_reason():
    assert find(lambda x, seeds: torch.zeros(len(seeds), 1)) == Form("batched")


def test_an_input_that_matters_under_some_seeds_is_tried_under_the_same_alone():
    """As with GLM-Image, where a prompt changes the tokens that one seed draws and not those of another."""

    def drawn(x, seeds):
        return torch.where(seeds == sample_seed("batching", 0), torch.as_tensor(x), 0.0)[:, None]

    assert find(drawn) == Form("batched")


@pytest.mark.parametrize("error", [KeyError, torch.OutOfMemoryError])
def test_the_pipelines_own_error_where_it_takes_no_form(error):
    tried = []

    def broken(x, seeds):
        tried.append(x)
        raise error(f"its own {len(tried)}")

    with pytest.raises(error, match="its own 1"):
        find(broken)
    assert len(tried) == (3 if error is KeyError else 1)  # memory that runs out is no answer
