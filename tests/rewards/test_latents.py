"""Rewards on latents: what the pipeline itself returns as such, and no decoder where nobody looks at pixels."""

import numpy as np
import pytest
import tiny_pipelines
import torch
from tiny_runs import are_equal, brightness, finished_run, logged, read_table, trained_weights, trainer_for

from diffusion_grpo.policy.rollout import DenoisingPolicy, rollout
from diffusion_grpo.rewards import RewardError, groupwise, score, takes_latents


@pytest.mark.parametrize("name", ["sd3", "flux", "sd15", "wan", "flux_inpaint"])
def test_latents_are_those_the_pipeline_returns_decoded_or_not(name, monkeypatch) -> None:
    """With noise in the steps; the samples beside them are those of a call without.

    `flux` packs its latents, `flux_inpaint` puts an image's own back after each step.
    """
    pipe, inputs = tiny_pipelines.build(name)
    policy = DenoisingPolicy(pipe)
    settings = {"seeds": [3, 4], "num_inference_steps": 3}
    plain, trajectory = rollout(policy, inputs, **settings)
    beside, alone = [], []
    samples, other = rollout(policy, inputs, **settings, latents=beside)
    decoded = []
    monkeypatch.setattr(pipe.vae, "decode", lambda *args, **kwargs: decoded.append(args))
    nothing, third = rollout(policy, inputs, **settings, latents=alone, is_decoded=False)
    assert nothing is None and not decoded and len(alone) == 2
    for one, two in zip(beside, alone, strict=True):
        assert torch.equal(one, two) and one.dtype == torch.float32 and one.abs().sum() > 0
    assert not torch.equal(alone[0], alone[1])
    assert torch.equal(trajectory.next_latents, third.next_latents)
    assert torch.equal(trajectory.log_probs, other.log_probs)
    assert np.array_equal(np.asarray(plain), np.asarray(samples))
    if name not in ("sd3", "flux"):  # whose own schedulers take the same steps where there is no noise
        return
    monkeypatch.undo()
    original = policy.pipe(
        **inputs,
        num_inference_steps=3,
        output_type="latent",
        generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)],
    )[0]
    deterministic = []
    rollout(policy, inputs, **settings, noise_level=0.0, latents=deterministic, is_decoded=False)
    torch.testing.assert_close(torch.stack(deterministic), original.float(), atol=1e-5, rtol=1e-5)


@takes_latents
def energy(latents, completions, prompts):
    assert latents is completions and latents.dtype == torch.float32 and not latents.requires_grad
    return latents.flatten(1).square().mean(1)


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_a_run_on_latents_decodes_nothing(name, tmp_path, monkeypatch) -> None:
    @groupwise
    @takes_latents
    def spread(latents, prompts):
        assert len(latents) == 2 or prompts == ["held out"] or prompts == ["and another"]
        return [latents.std()] * len(latents)

    settings = {"num_generations": 2, "num_inference_steps": 3, "save_samples_steps": 2}
    trainer = trainer_for(tmp_path / "latents", name=name, rewards={energy: 1, spread: 0.5}, **settings)
    decoded, decode = [], trainer.pipe.vae.decode
    monkeypatch.setattr(
        trainer.pipe.vae, "decode", lambda *args, **kwargs: decoded.append(trainer.state.global_step) or decode(*args)
    )
    trainer.train()
    assert set(decoded) == {0}  # where the samples are saved; not in the second update
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0] and len(logged(trainer, "diversity")) == 1
    table = read_table(tmp_path / "latents", 1)
    assert len(set(table["energy"])) == 8 and "file" not in table
    if name == "wan":
        return
    assert trainer.evaluate(metric_key_prefix="test")["test_rewards/energy/mean"] > 0
    mixed = finished_run(tmp_path / "mixed", rewards={energy: 1, spread: 0.5, brightness: 0}, **settings)
    assert are_equal(trained_weights(trainer), trained_weights(mixed))
    other = read_table(tmp_path / "mixed", 1)
    assert other["energy"] == table["energy"] and min(other["brightness"]) > 0


def test_what_has_no_latents_is_refused(tmp_path) -> None:
    pipe, _ = tiny_pipelines.build("sd3")
    with pytest.raises(RewardError, match="only a training run has"):
        score([energy], images=[pipe.image_processor.numpy_to_pil(torch.zeros(1, 8, 8, 3).numpy())[0]], prompts=["a"])
    latents = [torch.zeros(4, 8, 8), torch.zeros(4, 8, 16)]
    with pytest.raises(RewardError, match="equal size"):
        score([energy], latents=latents, prompts=["a", "b"])
