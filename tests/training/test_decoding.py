"""Latents are decoded a few at a time, and samples are the same; diffusers' slicing and tiling are switched on."""

import numpy as np
import pytest
import tiny_pipelines
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from tiny_runs import are_equal, finished_run, first_frame_brightness, logged, trained_weights, trainer_for

from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.training.decoding import DecodeInPieces, set_decoding

SEEDS = [1, 2, 3, 4, 5]


def decoded(name, **settings):
    """Samples of five seeds, with values from 0 to 255, and how many latents each call of the VAE had."""
    pipe, inputs = tiny_pipelines.build(name)
    sizes, real = [], pipe.vae.decode

    def decode(latents, *args, **kwargs):
        sizes.append(len(latents))
        return real(latents, *args, **kwargs)

    pipe.vae.decode = decode
    set_decoding(pipe, **settings)
    inputs |= {key: (value * 3)[:5] for key, value in inputs.items() if isinstance(value, list)}
    samples, _ = rollout(pipe, inputs, seeds=SEEDS, num_inference_steps=2)
    return [np.stack([np.asarray(frame) for frame in np.atleast_1d(sample)]) for sample in samples], sizes


@pytest.mark.parametrize("name", ["wan", "ltx"])  # LTX's VAE takes the timestep of each sample too
def test_samples_decoded_in_pieces_are_the_same(name):
    """Up to how a convolution of another batch size is rounded, 1e-6, which may move a pixel to the next level."""
    whole, sizes = decoded(name)
    for settings, expected in (({"batch_size": 2}, [2, 2, 1]), ({"slicing": True}, [5]), ({"batch_size": 5}, [5])):
        pieces, split = decoded(name, **settings)
        assert (sizes, split) == ([5], expected)
        moved = np.abs(np.stack(whole).astype(int) - np.stack(pieces))
        assert moved.max() <= (1 if split != sizes or "slicing" in settings else 0) and moved.mean() < 0.01


def test_what_belongs_to_a_sample_is_split_with_it():
    calls = []

    def decode(latents, timestep, scale=None, return_dict=True, generator=None):
        calls.append((latents.tolist(), timestep.tolist(), scale, generator))
        return DecoderOutput(sample=latents * 2) if return_dict else (latents * 2,)

    pieces = DecodeInPieces(decode, 2)
    latents, times = torch.arange(3.0)[:, None], torch.tensor([7.0, 8.0, 9.0])
    found = pieces(latents, times, scale=0.5, generator=["a", "b", "c"])
    assert isinstance(found, DecoderOutput) and torch.equal(found.sample, latents * 2)
    assert calls == [([[0.0], [1.0]], [7.0, 8.0], 0.5, ["a", "b"]), ([[2.0]], [9.0], 0.5, ["c"])]
    (tensor,) = pieces(latents, times, return_dict=False)
    assert torch.equal(tensor, latents * 2)
    calls.clear()
    pieces(latents[:2], times[:2])
    assert len(calls) == 1


def test_a_second_run_of_a_pipeline_decodes_as_it_says():
    """But tiling and slicing that a user has set stay."""
    pipe, _ = tiny_pipelines.build("sd3")
    set_decoding(pipe)
    assert not pipe.vae.use_slicing and not pipe.vae.use_tiling
    set_decoding(pipe, slicing=True, tiling=True)
    plain = pipe.vae.decode
    for batch_size in (2, 3):
        set_decoding(pipe, batch_size=batch_size)
        assert isinstance(pipe.vae.decode, DecodeInPieces) and pipe.vae.decode.__wrapped__ == plain
    set_decoding(pipe)
    assert pipe.vae.decode == plain and pipe.vae.use_tiling


def test_runs_and_evaluations_are_the_same(tmp_path):
    settings = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 3}
    plain = finished_run(tmp_path / "plain", **settings)
    spared = trainer_for(tmp_path / "spared", decode_batch_size=1, offload_frozen="cpu", **settings)
    sizes, real = [], spared.pipe.vae.decoder.forward
    spared.pipe.vae.decoder.forward = lambda latents, *args: sizes.append(len(latents)) or real(latents, *args)
    spared.train()
    assert set(sizes) == {1} and len(sizes) >= 8 + 2 * 3
    assert are_equal(trained_weights(spared), trained_weights(plain))
    assert logged(spared, "eval_reward") == logged(plain, "eval_reward")


def test_tiles_and_slices_of_a_run_are_used_in_rollouts(tmp_path):
    trainer = trainer_for(
        tmp_path, "wan", rewards=first_frame_brightness, vae_tiling=True, vae_slicing=True, max_steps=1
    )
    vae, tiles = trainer.pipe.vae, []
    vae.tile_sample_min_height = vae.tile_sample_min_width = 8
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 8
    real = vae.tiled_decode
    vae.tiled_decode = lambda latents, **kwargs: tiles.append(len(latents)) or real(latents, **kwargs)
    trainer.train()
    assert tiles and set(tiles) == {1}
