"""Each sample of a batch gets noise in its own steps only, and steps that samples share are computed once."""

import painter
import pytest
import tiny_pipelines
import torch
from recorded import make_policy

from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout, run_prefix
from diffusion_grpo.policy.token import TokenPolicy

# flow matching, DDIM with its relatives, EDM; a video, two experts, a step that moves video and sound
KINDS = ["sd3", "flux", "sd15", "kandinsky_prior", "cascade_prior", "deepfloyd", "cosmos", "cosmos2", "svd", "sdxl"]
KINDS += ["wan", "wan_experts", "ltx2", "sana"]
SEEDS, STEPS = [1, 2], 5


def ratio_error(policy, inputs, trajectory, owners):
    """Largest |ratio - 1| over all samples and steps, where those of one initial latent share a call again."""
    shared = -1 if trajectory.shared_steps is None else int(trajectory.shared_steps[0])
    found = []
    for step in trajectory.steps[0].tolist():
        calls = {"inputs": once(inputs, owners), "sources": owners} if step == shared else {"inputs": inputs}
        found.append(replay(policy, trajectory=trajectory, step=step, **calls).log_prob.detach())
    return (torch.stack(found, 1) - trajectory.log_probs).expm1().abs().max().item()


def once(inputs, owners):
    """The inputs of a call with one sample per initial latent."""
    return {key: pick(value, len(owners), [owners.index(one) for one in range(max(owners) + 1)])
            for key, value in inputs.items()}  # fmt: skip


def alike(name, count):
    """A policy, and inputs of `count` samples of one prompt."""
    pipe, inputs = tiny_pipelines.build(name)
    rows = next(len(value) for value in inputs.values() if isinstance(value, list))
    chosen = [0] * count
    return DenoisingPolicy(pipe), {key: pick(value, rows, chosen) for key, value in inputs.items()}


def pick(value, rows, chosen):
    """The entries of some samples, of an input that has one per sample."""
    if isinstance(value, list) and len(value) == rows:
        return [value[index] for index in chosen]
    return value[chosen] if torch.is_tensor(value) and value.ndim > 1 and len(value) == rows else value


@pytest.mark.parametrize("name", KINDS)
def test_samples_with_steps_of_their_own_are_as_with_each_others_steps(name):
    """Bit for bit: a sample without noise in a step is as if nobody drew any, one with noise as if all did."""
    policy, inputs = make_policy(name)

    def roll(noise_steps, steps):
        return rollout(policy, inputs, seeds=SEEDS, num_inference_steps=STEPS, noise_steps=noise_steps, steps=steps)[1]

    together = roll([range(1, 2), range(2, 4)], [[1], [3]])
    for row, (noisy, steps) in enumerate([([1], [1]), ([2, 3], [3])]):
        alone = roll(noisy, [steps] * len(SEEDS))
        for field in ("latents", "next_latents", "log_probs"):
            assert torch.equal(getattr(together, field)[row], getattr(alone, field)[row]), field
    assert not torch.equal(together.latents[1], roll([1, 2, 3], [[3], [3]]).latents[1])


@pytest.mark.parametrize(
    ("noise_steps", "steps", "match"),
    [
        ([[1], [1], [1]], [[1], [1]], "3 sequences of steps for 2 samples"),
        ([[1], [2]], [[1], [1]], "Sample 1 trains on step 1, in which it draws no noise"),
    ],
)
def test_noisy_steps_that_do_not_fit_are_refused(noise_steps, steps, match):
    pipe, inputs = tiny_pipelines.build("sd3")
    with pytest.raises(ValueError, match=match):
        rollout(pipe, inputs, seeds=SEEDS, num_inference_steps=STEPS, noise_steps=noise_steps, steps=steps)


def branch(policy, inputs, owners, length, **settings):
    """Roll out samples that branch from as many initial latents as `owners` names, and the same without sharing."""
    initial = torch.arange(100, 101 + max(owners))
    rolled = {"seeds": range(len(owners)), "initial_seeds": initial[list(owners)], "num_inference_steps": STEPS}
    rolled |= {"noise_steps": range(length, STEPS - 1), "steps": [list(range(length, STEPS - 1))] * len(owners)}
    prefix = run_prefix(policy, once(inputs, owners), length, num_inference_steps=STEPS, initial_seeds=initial)
    shared = rollout(policy, inputs, prefix=prefix[list(owners)], **rolled | settings)
    return shared, rollout(policy, inputs, **rolled | settings)


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("name", KINDS)
def test_in_one_geometry_branches_are_the_samples_to_the_last_bit(name, length):
    """As many initial latents as samples, so that the prefix passes the network in the same batch."""
    policy, inputs = make_policy(name)
    (_, shared), (_, apart) = branch(policy, inputs, [0, 1], length)
    for field in ("latents", "next_latents", "log_probs", "initial_seeds"):
        assert torch.equal(getattr(shared, field), getattr(apart, field)), field
    assert (shared.shared_steps is None) == (name == "cosmos")  # which hands its scheduler a clean sample as well
    assert ratio_error(policy, inputs, shared, [0, 1]) == 0.0


@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("name", ["sd3", "sd15", "svd", "wan", "ltx2"])
def test_branches_share_a_start_and_replay_exactly(name, length):
    policy, inputs = alike(name, 4)
    (_, shared), (_, apart) = branch(policy, inputs, [0, 0, 1, 1], length)
    starts = shared.latents[:, 0].flatten(1)
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[2], starts[3])
    assert not torch.allclose(starts[0], starts[2])
    assert len(torch.unique(shared.next_latents[:, 0].flatten(1), dim=0)) == 4
    torch.testing.assert_close(shared.latents, apart.latents, rtol=1e-4, atol=1e-4)
    assert shared.shared_steps.tolist() == [length] * 4
    assert ratio_error(policy, inputs, shared, [0, 0, 1, 1]) == 0.0


def test_finished_samples_and_their_latents_are_as_without_sharing():
    policy, inputs = alike("sd3", 4)
    (shared, _), (apart, _) = branch(policy, inputs, [0, 0, 1, 1], 2, latents=(kept := []))
    pairs = [[torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).int() for image in pair]
             for pair in zip(shared, apart, strict=True)]  # fmt: skip
    assert max((one - other).abs().max() for one, other in pairs) <= 1
    assert shared[0].tobytes() != shared[1].tobytes()
    torch.testing.assert_close(torch.stack(kept[:4]), torch.stack(kept[4:]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(kept[0], kept[1])


@pytest.mark.parametrize("name", ["sd3", "wan", "ltx2"])
def test_shared_steps_pass_the_network_once_for_all_branches(name):
    """T_prefix + 1 calls for each initial latent and the others for each sample, in place of T for each sample."""
    policy, inputs = alike(name, 6)
    owners, length = [0, 0, 0, 1, 1, 1], 3
    branch(policy, inputs, owners, length)  # outputs of the skipped steps have known shapes from here on
    linear = next(module for module in policy.network.modules() if isinstance(module, torch.nn.Linear))
    passes = []
    linear.register_forward_hook(lambda module, args, output: passes.append(len(output)))
    branch(policy, inputs, owners, length)
    expected = 2 * (length + 1) + 6 * (STEPS - length - 1) + 6 * STEPS
    halves = sum(passes) // expected  # of guidance, in one pass or in two
    assert halves in (1, 2)
    assert sum(passes) == halves * expected
    assert sorted(set(passes)) == sorted({count * (1 if name == "wan" else halves) for count in (2, 6)})


def test_a_prefix_of_tokens_and_latents_goes_on_with_its_tokens():
    """The language model of GLM-Image writes once per initial latent."""
    policy, inputs = alike("glm_image", 4)
    (_, shared), (_, apart) = branch(policy, inputs, [0, 0, 1, 1], 2)
    assert torch.equal(shared.tokens, apart.tokens) and torch.equal(shared.tokens[0], shared.tokens[1])
    assert ratio_error(policy, inputs, shared, [0, 0, 1, 1]) == 0.0


@pytest.mark.parametrize("name", ["sd3", "sd15", "wan", "ltx2"])
def test_one_pass_trains_all_branches_of_a_latent(name):
    """The gradient of the samples' weighted log-probabilities, with one row of the network for each latent."""
    policy, inputs = alike(name, 6)
    owners, weights = [0, 0, 0, 1, 1, 1], torch.tensor([1.0, -0.5, 0.3, -1.2, 0.7, 0.4])
    (_, trajectory), _ = branch(policy, inputs, owners, 1)
    linear = next(module for module in policy.network.modules() if isinstance(module, torch.nn.Linear))
    rows = []
    hook = linear.register_forward_hook(lambda module, args, output: rows.append(len(output)))

    def measure(**calls):
        policy.network.zero_grad()
        rows.clear()
        step = replay(policy, trajectory=trajectory, step=1, **calls)
        (step.log_prob * weights.to(step.log_prob)).sum().backward()
        return (
            step,
            torch.cat([p.grad.flatten() for p in policy.network.parameters() if p.grad is not None]),
            sum(rows),
        )

    together, gradient, few = measure(inputs=once(inputs, owners), sources=owners)
    apart, expected, many = measure(inputs=inputs)
    hook.remove()
    assert many == 3 * few
    for field in ("mean", "log_prob", "prediction"):
        torch.testing.assert_close(getattr(together, field), getattr(apart, field), rtol=1e-4, atol=1e-4)
    for field in ("std", "jacobian", "moving"):
        assert torch.equal(getattr(together.scale, field), getattr(apart.scale, field)), field
    assert (gradient - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("length", "change", "error", "match"),
    [
        (-1, {}, ValueError, "at least 0 steps"),
        (4, {}, UnsupportedPipeline, "takes 5 steps, so samples cannot branch at step 4"),
        (2, {"initial_seeds": [7, 8]}, ValueError, r"initial seeds \[100, 101\], the samples \[7, 8\]"),
        (2, {"noise_steps": [1, 2, 3]}, ValueError, "branch at step 2 cannot draw noise in step 1"),
    ],
)
def test_what_cannot_branch_is_refused(length, change, error, match):
    pipe, inputs = tiny_pipelines.build("sd3")
    with pytest.raises(error, match=match):
        branch(DenoisingPolicy(pipe), inputs, [0, 1], length, **change)


def test_tokens_cannot_branch():
    policy = TokenPolicy(painter.make_painter(), "writer")
    with pytest.raises(UnsupportedPipeline, match="samples_per_latent"):
        run_prefix(policy, painter.INPUTS, 1, num_inference_steps=4, initial_seeds=[1, 2])
