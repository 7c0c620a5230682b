"""Steps that samples share are taken once per initial latent."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import logged, trained_weights, trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.policy.trajectory import Prefix
from diffusion_grpo.rollout.generate import compute_prefixes


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[0, 1, 2, 3], [4]], [(["a", "b"], [7, 8]), (["c"], [9])]),  # as a replay of these calls
        ([[0], [1, 2], [3], [4]], [(["a"], [7]), (["b"], [8]), (["c"], [9])]),  # a latent in several calls
    ],
)
@pytest.mark.parametrize("repeats", [0, 1])
def test_each_initial_latent_is_computed_once_and_each_sample_finds_its_own(repeats, calls, expected):
    asked = []

    def run(inputs, length, initial_seeds):
        assert length == 2
        asked.append((inputs["rows"], initial_seeds.tolist()))
        return Prefix(initial_seeds[:, None].float(), initial_seeds, length)

    # another process may have more calls: this one repeats its last
    backend = SimpleNamespace(equalize=lambda calls: [(call, True) for call in calls] + [(calls[-1], False)] * repeats)
    prefixes = compute_prefixes(
        run,
        lambda rows: {"rows": rows},
        backend,
        ["a", "a", "b", "b", "c"],
        calls,
        SimpleNamespace(initial_seeds=torch.tensor([7, 7, 8, 8, 9]), prefix_lengths=[2] * 5),
    )
    assert asked == expected + expected[-1:] * repeats
    assert [float(prefixes[sample].latents) for sample in (1, 0, 4)] == [7.0, 7.0, 9.0]


# In training

SILENT = {"noisy_steps": "trained"}
ONE_LATENT = {"samples_per_latent": "group"}
TWO_PROMPTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
SHARING = {  # settings, and which of the three trained steps pass once for all samples of an initial latent
    "the first step, fdfo": (ONE_LATENT | SILENT | {"trained_steps": [0, 1], "loss_type": "fdfo"}, (4,)),
    "two prompts in a call": (ONE_LATENT | SILENT | TWO_PROMPTS | {"trained_steps": [0, 2]}, (4, 1)),
    "a later step, with reference": (ONE_LATENT | SILENT | {"trained_steps": [1, 3], "beta": 0.1}, (4, 1)),
    "branches": ({"samples_per_latent": 2, "trained_steps": [0, 2]} | SILENT, (2, 1)),
    "replayed anchors": (ONE_LATENT | {"num_iterations": 2, "max_steps": 4, "old_log_prob": "replay"}, (4, 1, 1)),
    "dppo": (ONE_LATENT | {"num_iterations": 2, "max_steps": 4, "loss_type": "dppo"}, (4, 1, 1)),
    "the best and the worst": (ONE_LATENT | SILENT | {"trained_steps": [0, 1], "best_of_n": 2}, (2,)),
    "divergence as reward": (ONE_LATENT | {"kl_reward": 0.1}, (4, 1, 1)),
}


def train(folder, draws_globally=False, **settings):
    """A trained run, how far its weights moved, and how many rows its network passed with gradient."""
    trainer = trainer_for(folder, optim="sgd", learning_rate=1.0, **settings)
    trainer.inputs.draws_globally |= draws_globally
    before, rows = trained_weights(trainer), []
    linear = next(part for part in trainer.policy.network.modules() if isinstance(part, torch.nn.Linear))
    linear.register_forward_hook(
        lambda module, args, output: rows.append(len(output)) if torch.is_grad_enabled() else None
    )
    trainer.train()
    moved = {name: weight - before[name] for name, weight in trained_weights(trainer).items()}
    return trainer, torch.cat([part.flatten() for part in moved.values()]), sum(rows)


# these combine what the other cases check one by one
SLOW = ("replayed anchors", "divergence as reward")


@pytest.mark.parametrize(
    "sharing", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SHARING]
)
def test_sharing_calls_changes_nothing_but_their_number(tmp_path, monkeypatch, sharing):
    settings, shares = SHARING[sharing]
    together, moved, few = train(tmp_path / "together", **settings)
    # of the best and the worst a micro-batch has those of several prompts, in another call than the rollout's
    assert logged(together, "ratio/max_error")[0] <= (1e-6 if "best_of_n" in settings else 0.0)
    monkeypatch.setattr(DiffusionGRPOConfig, "shares_calls", False)
    apart, expected, many = train(tmp_path / "apart", **settings)
    assert (moved - expected).norm() < 1e-3 * expected.norm() > 0
    assert logged(together, "reward") == pytest.approx(logged(apart, "reward"), abs=1e-4)
    assert few / many == pytest.approx(sum(1 / share for share in shares) / len(shares))


def test_calls_that_may_differ_are_not_shared(tmp_path):
    """What a pipeline draws from the global generator differs from row to row."""
    settings = ONE_LATENT | {"trained_steps": [0, 1]} | SILENT
    _, _, few = train(tmp_path / "together", **settings)
    _, _, many = train(tmp_path / "apart", draws_globally=True, **settings)
    assert many == 4 * few
