"""Steps that samples share are taken once per initial latent."""

from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.policy.trajectory import Prefix
from diffusion_grpo.rollout import prefixes
from diffusion_grpo.rollout.prefixes import compute_prefixes, split_by_length


def test_calls_are_split_where_samples_branch_at_different_steps():
    assert split_by_length([[0, 1, 2], [3, 4]], [2, 3, 2, 1, 1]) == [[0, 2], [1], [3, 4]]


class Inputs:
    """Two samples in a call; the arguments of a call are its rows."""

    def calls(self, rows):
        return [list(range(start, min(start + 2, len(rows)))) for start in range(0, len(rows), 2)]

    def __call__(self, rows):
        return {"rows": rows}


@pytest.mark.parametrize("repeats", [0, 1])
def test_each_initial_latent_is_computed_once_and_each_sample_finds_its_own(monkeypatch, repeats):
    asked = []

    def run(policy, inputs, length, *, num_inference_steps, initial_seeds, device):
        asked.append((inputs["rows"], length, initial_seeds.tolist()))
        return Prefix(initial_seeds[:, None].float(), initial_seeds, length)

    monkeypatch.setattr(prefixes, "run_prefix", run)
    # another process may have more calls: this one repeats its last
    backend = SimpleNamespace(
        equalize_outside_updates=lambda calls: [(call, True) for call in calls] + [(calls[-1], False)] * repeats
    )
    find = compute_prefixes(
        None,
        Inputs(),
        backend,
        ["a", "a", "b", "b", "c"],
        initial_seeds=torch.tensor([7, 7, 8, 8, 9]),
        lengths=[1, 1, 2, 2, 1],
        num_inference_steps=4,
        device="cpu",
    )
    calls = [(["a"], 1, [7]), (["b"], 2, [8]), (["c"], 1, [9])]
    assert asked == calls + calls[-1:] * repeats
    assert find([1, 0, 4]).latents.flatten().tolist() == [7.0, 7.0, 9.0] and find([3]).length == 2
