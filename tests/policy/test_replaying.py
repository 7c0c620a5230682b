"""Drivers of replays: what is handed back and scored, and what of a latent reaches a network."""

import pytest
import tiny_pipelines
import torch
from half_steps import SEEDS, HalfSteps
from torch import nn

from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.drivers import FinishDriver, Recorder, StepScored, UnsupportedPipeline
from diffusion_grpo.policy.replaying import InputWatch, ReplayDriver
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.trajectory import RolloutRequest


def test_a_step_of_two_latents_is_scored_as_one():
    """As of video and audio, each with its own scheduler; the mean is over all dimensions together."""
    video, audio = HalfSteps(2), HalfSteps(2)
    recorder = Recorder(RolloutRequest(SEEDS, SEEDS, 4), 0.7)
    first = (
        recorder.step(video, 0, None, None, torch.ones(2, 6)),
        recorder.step(audio, 0, None, None, torch.ones(2, 2)),
    )
    trajectory = recorder.trajectory()
    assert trajectory.latents.shape == (2, 1, 8)
    expected = -((torch.cat(first, 1) - 0.5) ** 2).mean(1)
    torch.testing.assert_close(trajectory.log_probs[:, 0], expected)
    teacher = ReplayDriver(0, trajectory)
    handed = torch.ones(2, 2, 3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    assert teacher.step(video, 0, handed[0], None, handed[0]) is handed[0]
    with pytest.raises(StepScored):
        teacher.step(audio, 0, handed[1], None, handed[1])
    now = teacher.scored
    torch.testing.assert_close(now.log_prob, expected)
    assert now.velocity.shape == now.mean.shape == (2, 8)
    found, *parts = torch.autograd.grad(now.log_prob.sum(), [now.mean, *handed])
    torch.testing.assert_close(found, (torch.cat(first, 1) - now.mean) / 4)  # all of it goes through the joined mean
    torch.testing.assert_close(torch.cat([part.flatten(1) for part in parts], 1), found / 2)
    with pytest.raises(UnsupportedPipeline, match="change 2 latents at once"):
        FinishDriver(recorder)


@pytest.mark.parametrize("name", ["sd15", "wan", "cosmos"])
def test_the_prediction_is_what_the_scheduler_got_in_the_rollout(name, monkeypatch):
    pipe, inputs = tiny_pipelines.build(name)
    policy, seen = DenoisingPolicy(pipe), []
    distribution = type(policy.scheduler).distribution
    with monkeypatch.context() as patch:
        note = lambda self, prediction, *args: seen.append(prediction) or distribution(self, prediction, *args)  # noqa: E731
        patch.setattr(type(policy.scheduler), "distribution", note)
        _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=4)
    assert len(seen) >= 3
    for step, prediction in enumerate(seen):
        now = replay(policy, inputs, trajectory, step)
        assert torch.equal(now.prediction, prediction) and now.log_prob.requires_grad
        assert not now.prediction.requires_grad and not now.velocity.requires_grad  # they would keep the whole graph


# What of a latent reaches a network: found by autograd, without a trace in what runs


class Network(nn.Module):
    """Keeps what it is called with."""

    def __init__(self, watch=None):
        super().__init__()
        self.scale, self.watch, self.given = nn.Parameter(torch.ones(())), watch, []

    def forward(self, *args, **kwargs):
        args, kwargs = self.watch.take_inputs(args, kwargs)
        self.given.append((args, kwargs))
        return args[0] * self.scale


class ControlNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        self.result = self.inner(x)
        return self.result


@pytest.fixture
def network():
    network = Network()
    network.watch = InputWatch([network])
    return network


@pytest.mark.parametrize("mode", [True, False])
def test_what_is_replaced_scaled_moved_or_summed(network, mode):
    latents, condition = torch.randn(2, 4, 3), torch.randn(2, 3)
    with torch.set_grad_enabled(mode), network.watch.closing():
        handed = network.watch.follow(latents)
        assert torch.equal(handed, latents)
        handed[:, 0] = condition  # in place
        mask = torch.tensor([0.0, 1.0, 1.0])[:, None]
        given = [torch.cat([handed[:, :1], mask * handed[:, 1:]], dim=1).half() * 1e-2, {"x": (handed * 0.0).sum()}]
        output = network(given[0], time=given[1])
        assert torch.is_grad_enabled() == mode and output.requires_grad == mode
    expected = torch.ones(2, 4, 3, dtype=torch.bool)
    expected[:, :2] = False
    assert torch.equal(network.watch.seen[0], expected)
    args, kwargs = network.given[0]
    assert torch.equal(args[0], given[0]) and not args[0].requires_grad and not kwargs["time"]["x"].requires_grad


def test_several_latents_and_several_calls(network):
    first, second, third = torch.randn(1, 2), torch.randn(1, 2), torch.randn(1, 2)
    with torch.no_grad(), network.watch.closing():
        one, two, _ = (network.watch.follow(latents) for latents in (first, second, third))
        once, again = one * torch.tensor([1.0, 0.0]), [one * torch.tensor([0.0, 2.0]), two]
        network(once)
        network(*again, "text")
    assert [seen if seen is None else seen.tolist() for seen in network.watch.seen] == [
        [[True, True]],
        [[True, True]],
        None,
    ]


def test_other_modules_make_no_graph_and_what_comes_from_weights_keeps_its_own(network):
    control, weight = ControlNet(), nn.Parameter(torch.ones(1, 3))
    with network.watch.closing():
        handed = network.watch.follow(torch.randn(1, 3))
        network(handed, control(handed), weight * 2)
    (_, residual, own), _ = network.given[0]
    assert not control.result.requires_grad and not residual.requires_grad and own.requires_grad
    assert network.watch.seen[0].all()


def test_an_error_on_the_way_leaves_nothing_behind(network):
    control = ControlNet()
    with torch.no_grad():
        with pytest.raises(RuntimeError), network.watch.closing():
            control(network.watch.follow(torch.randn(1, 5)))
        assert not torch.is_grad_enabled()
    assert control(torch.randn(1, 3)).requires_grad  # no hook is left that would switch it off
