"""Rollout and replay: what was drawn is what is scored, whatever the pipeline, the batch or the grad mode."""

import pytest
import tiny_pipelines
import torch
from diffusers import TCDScheduler
from recorded import SEEDS, make_policy, record

from diffusion_grpo.policy.rollout import DenoisingPolicy, Trajectory, replay, rollout


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
    policy, inputs = make_policy(name)
    policy.network.enable_gradient_checkpointing()
    assert ratio_error(policy, inputs, record(policy, inputs)) == 0.0


@pytest.mark.parametrize("process", ["flow_sde", "dance_sde", "wan_sde", "cps", "precise"])
def test_every_flow_process_replays_exactly(process):
    policy, inputs = make_policy(sde_type=process)
    assert ratio_error(policy, inputs, record(policy, inputs)) == 0.0


def test_in_bfloat16_the_ratio_is_one_within_1e_5():
    policy, inputs = make_policy()
    policy.pipe.to(dtype=torch.bfloat16)
    trajectory = record(policy, inputs)
    assert torch.equal(trajectory.next_latents, trajectory.next_latents.bfloat16().float())  # rounded, then scored
    assert trajectory.latents.dtype == torch.float32
    assert ratio_error(policy, inputs, trajectory) <= 1e-5


def test_the_noise_of_the_steps_is_not_the_initial_latent():
    policy, inputs = make_policy()
    trajectory = record(policy, inputs)
    step = replay(policy, inputs, trajectory, 0)
    noise = ((trajectory.next_latents[:, 0] - step.mean) / step.std).detach()
    correlation = torch.corrcoef(torch.stack([noise.flatten(), trajectory.latents[:, 0].flatten()]))[0, 1]
    assert abs(correlation) < 4 / noise.numel() ** 0.5


def test_a_changed_network_changes_the_ratio():
    policy, inputs = make_policy()
    trajectory = record(policy, inputs)
    with torch.no_grad():
        next(policy.network.parameters()).mul_(1.01)
    assert ratio_error(policy, inputs, trajectory) > 1e-6


def test_chunks_get_the_noise_of_the_whole_batch():
    policy, inputs = make_policy()

    def roll(seeds):
        return record(policy, inputs | {"prompt": inputs["prompt"][:1] * len(seeds)}, seeds=seeds)

    whole, chunked = roll([5, 6, 7, 8]), Trajectory.cat([roll([5]), roll([6, 7, 8])])
    assert torch.equal(chunked.latents[:, 0], whole.latents[:, 0])  # the initial latents, before any arithmetic
    torch.testing.assert_close(chunked.next_latents, whole.next_latents, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole.latents[0], whole.latents[1])  # each sample has its own


def test_equal_initial_seeds_share_the_start_and_nothing_else():
    policy, inputs = make_policy()
    trajectory = record(policy, inputs | {"prompt": inputs["prompt"][:1] * 2}, initial_seeds=[3, 3])
    assert torch.equal(trajectory.latents[0, 0], trajectory.latents[1, 0])
    assert not torch.equal(trajectory.next_latents[0, 0], trajectory.next_latents[1, 0])


def test_only_trained_steps_are_kept_and_each_sample_may_have_its_own():
    policy, inputs = make_policy()
    trajectory = record(policy, inputs, num_inference_steps=5, steps=[[0, 2], [1, 3]])
    assert trajectory.latents.shape[:2] == (2, 2) and trajectory.steps.tolist() == [[0, 2], [1, 3]]
    first = {**inputs, "prompt": inputs["prompt"][:1]}
    log_prob = replay(policy, first, trajectory[:1], 2).log_prob
    torch.testing.assert_close(log_prob.detach(), trajectory.log_probs[:1, 1], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="recorded for 1 of 2 samples"):
        replay(policy, inputs, trajectory, 2)


def test_steps_without_noise_are_deterministic():
    policy, inputs = make_policy()
    ways = {"noise_level": 0.0}, {"noise_steps": [], "steps": [[], []]}, {"noise_steps": [1], "steps": [[1], [1]]}
    made = [rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4, **way)[0] for way in ways]
    pixels = [[image.tobytes() for image in images] for images in made]
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
    (policy, inputs), calls = make_policy(), []
    trajectory = record(policy, inputs, num_inference_steps=5)
    policy.pipe.vae.decode = lambda *args, **kwargs: pytest.fail("decoded")
    policy.network.transformer_blocks[0].register_forward_hook(lambda *_: calls.append("block"))
    replay(policy, inputs, trajectory, 3)
    assert calls == ["block"]


def test_a_reference_replays_in_place_of_the_network():
    (policy, inputs), (other, _) = make_policy(), tiny_pipelines.build("sd3", seed=1)
    trajectory = record(policy, inputs)
    here = replay(policy, inputs, trajectory, 1).mean
    there = replay(policy, inputs, trajectory, 1, forward=other.transformer.forward).mean
    assert not torch.allclose(here, there)
    policy.network.load_state_dict(other.transformer.state_dict())
    assert torch.equal(replay(policy, inputs, trajectory, 1).mean, there)


def test_latents_that_a_callback_edits_between_steps_replay_exactly():
    policy, inputs = make_policy()
    plain = record(policy, inputs)
    inputs["callback_on_step_end"] = lambda pipe, step, timestep, tensors: {"latents": 0.5 * tensors["latents"]}
    trajectory = record(policy, inputs)
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
    policy = DenoisingPolicy(pipe, sde_type=sde)
    policy.check_noise_level(1.0)
    with pytest.raises(ValueError, match="noise_level must lie in"):
        record(policy, inputs, noise_level=1.4)
