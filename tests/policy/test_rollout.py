"""Rollout and replay: what was drawn is what is scored, whatever the pipeline, the batch or the grad mode."""

import pytest
import tiny_pipelines
import torch
from diffusers import TCDScheduler

from diffusion_grpo.policy.rollout import DenoisingPolicy, Trajectory, replay, rollout

SEEDS = [1, 2]


def ratio_error(policy, inputs, trajectory):
    """Largest |ratio - 1| over all samples and steps, from replays with gradient."""
    errors = []
    for column, step in enumerate(trajectory.steps[0].tolist()):
        log_prob = replay(policy, inputs, trajectory, step).log_prob
        assert log_prob.requires_grad
        errors.append((log_prob.detach() - trajectory.log_probs[:, column]).expm1().abs().max())
    return max(errors).item()


@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl", "sd15", "wan"])
def test_the_ratio_is_exactly_one_in_float32_with_gradient_checkpointing(name):
    pipe, inputs = tiny_pipelines.build(name)
    policy = DenoisingPolicy(pipe)
    policy.network.enable_gradient_checkpointing()
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    assert ratio_error(policy, inputs, trajectory) == 0.0


@pytest.mark.parametrize("process", ["flow_sde", "dance_sde", "wan_sde", "cps", "precise"])
def test_every_flow_process_replays_exactly(process):
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe, sde_type=process)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    assert ratio_error(policy, inputs, trajectory) == 0.0


def test_in_bfloat16_the_ratio_is_one_within_1e_5():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.to(dtype=torch.bfloat16)
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    assert torch.equal(trajectory.next_latents, trajectory.next_latents.bfloat16().float())  # rounded, then scored
    assert trajectory.latents.dtype == torch.float32
    assert ratio_error(policy, inputs, trajectory) <= 1e-5


def test_the_noise_of_the_steps_is_not_the_initial_latent():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    step = replay(policy, inputs, trajectory, 0)
    noise = ((trajectory.next_latents[:, 0] - step.mean) / step.std).detach()
    correlation = torch.corrcoef(torch.stack([noise.flatten(), trajectory.latents[:, 0].flatten()]))[0, 1]
    assert abs(correlation) < 4 / noise.numel() ** 0.5


def test_a_changed_network_changes_the_ratio():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    with torch.no_grad():
        next(policy.network.parameters()).mul_(1.01)
    assert ratio_error(policy, inputs, trajectory) > 1e-6


def test_chunks_get_the_noise_of_the_whole_batch():
    pipe, inputs = tiny_pipelines.build("sd3")
    inputs["prompt"] = [inputs["prompt"][0]] * 4
    policy, seeds = DenoisingPolicy(pipe), [5, 6, 7, 8]
    _, whole = rollout(policy, inputs, seeds=seeds, num_inference_steps=4)
    parts = []
    for chunk in (slice(0, 1), slice(1, 4)):
        part = {**inputs, "prompt": inputs["prompt"][chunk]}
        parts.append(rollout(policy, part, seeds=seeds[chunk], num_inference_steps=4)[1])
    chunked = Trajectory.cat(parts)
    assert torch.equal(chunked.latents[:, 0], whole.latents[:, 0])  # the initial latents, before any arithmetic
    torch.testing.assert_close(chunked.next_latents, whole.next_latents, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole.latents[0], whole.latents[1])  # each sample has its own


def test_equal_initial_seeds_share_the_start_and_nothing_else():
    pipe, inputs = tiny_pipelines.build("sd3")
    inputs["prompt"] = [inputs["prompt"][0]] * 2
    _, trajectory = rollout(pipe, inputs, seeds=SEEDS, initial_seeds=[3, 3], num_inference_steps=4)
    assert torch.equal(trajectory.latents[0, 0], trajectory.latents[1, 0])
    assert not torch.equal(trajectory.next_latents[0, 0], trajectory.next_latents[1, 0])


def test_only_trained_steps_are_kept_and_each_sample_may_have_its_own():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=5, steps=[[0, 2], [1, 3]])
    assert trajectory.latents.shape[:2] == (2, 2) and trajectory.steps.tolist() == [[0, 2], [1, 3]]
    first = {**inputs, "prompt": inputs["prompt"][:1]}
    log_prob = replay(policy, first, trajectory[:1], 2).log_prob
    torch.testing.assert_close(log_prob.detach(), trajectory.log_probs[:1, 1], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="recorded for 1 of 2 samples"):
        replay(policy, inputs, trajectory, 2)


def test_steps_without_noise_are_deterministic():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    ways = [rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4, noise_level=0.0)[0]]
    ways += [rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4, noise_steps=[], steps=[[], []])[0]]
    ways += [rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4, noise_steps=[1], steps=[[1], [1]])[0]]
    pixels = [[image.tobytes() for image in images] for images in ways]
    assert pixels[0] == pixels[1] != pixels[2]


def test_each_distinct_prompt_is_encoded_once_and_never_in_replay():
    pipe, inputs = tiny_pipelines.build("sd3")
    inputs["prompt"] = ["one", "two", "one", "one"]
    encoded = []
    pipe.text_encoder.register_forward_hook(lambda module, args, output: encoded.append(len(args[0])))
    policy = DenoisingPolicy(pipe)
    images, trajectory = rollout(policy, inputs, seeds=[1, 2, 3, 4], num_inference_steps=3)
    # each prompt alone, and the empty one of guidance; both together once, to see whether rows are samples
    assert sorted(encoded) == [1, 1, 1, 1, 2, 2]
    replay(policy, inputs, trajectory, 1)
    rollout(policy, inputs, seeds=[1, 2, 3, 4], num_inference_steps=3)
    assert len(encoded) == 6
    policy.prompts.clear()
    rollout(policy, inputs, seeds=[1, 2, 3, 4], num_inference_steps=3)
    assert encoded[6:] == [1, 1, 1, 1]
    plain = pipe(**inputs, num_inference_steps=3, generator=[torch.Generator().manual_seed(s) for s in (1, 2, 3, 4)])
    mine, _ = rollout(policy, inputs, seeds=[1, 2, 3, 4], num_inference_steps=3, noise_level=0.0)
    differences = [
        (torch.frombuffer(bytearray(a.tobytes()), dtype=torch.uint8).int()
         - torch.frombuffer(bytearray(b.tobytes()), dtype=torch.uint8).int()).abs().max()
        for a, b in zip(plain.images, mine, strict=True)
    ]  # fmt: skip
    assert max(differences) <= 1  # every sample has its own prompt's encoding


def test_a_replay_runs_the_network_for_one_step_and_never_the_decoder():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy, calls = DenoisingPolicy(pipe), []
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=5)
    policy.network.register_forward_hook(lambda *_: calls.append("network"))
    real = pipe.vae.decode
    pipe.vae.decode = lambda *args, **kwargs: calls.append("decoder") or real(*args, **kwargs)
    inner = policy.network.transformer_blocks[0]
    inner.register_forward_hook(lambda *_: calls.append("block"))
    replay(policy, inputs, trajectory, 3)
    assert calls.count("block") == 1 and "decoder" not in calls


def test_a_reference_replays_in_place_of_the_network():
    pipe, inputs = tiny_pipelines.build("sd3")
    other, _ = tiny_pipelines.build("sd3", seed=1)
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    here = replay(policy, inputs, trajectory, 1).mean
    there = replay(policy, inputs, trajectory, 1, forward=other.transformer.forward).mean
    assert not torch.allclose(here, there)
    pipe.transformer.load_state_dict(other.transformer.state_dict())
    assert torch.equal(replay(policy, inputs, trajectory, 1).mean, there)


def test_latents_that_a_callback_edits_between_steps_replay_exactly():
    pipe, inputs = tiny_pipelines.build("sd3")
    plain = rollout(pipe, inputs, seeds=SEEDS, num_inference_steps=4)[1]
    edit = lambda pipe, step, timestep, tensors: {"latents": 0.5 * tensors["latents"]}  # noqa: E731
    inputs["callback_on_step_end"] = edit
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    assert not torch.equal(trajectory.next_latents[:, 1], plain.next_latents[:, 1])
    assert ratio_error(policy, inputs, trajectory) == 0.0


@pytest.mark.parametrize(
    ("name", "sde"),
    [("sd15", "ddim"), ("cosmos", "ancestral"), ("sd3", "cps"), ("lcm", "consistency"), ("lcm", "tcd")],
)
def test_a_step_cannot_draw_more_noise_than_its_latent_holds(name, sde):
    """These take the step's noise from that of the latent."""
    pipe, inputs = tiny_pipelines.build(name)
    if sde == "tcd":
        pipe.scheduler = TCDScheduler.from_config(pipe.scheduler.config)
    policy, call = DenoisingPolicy(pipe, sde_type=sde), {"seeds": SEEDS, "num_inference_steps": 4, "noise_level": 1.4}
    policy.check_noise_level(1.0)
    with pytest.raises(ValueError, match="noise_level must lie in"):
        rollout(policy, inputs, **call)
