"""Train the embedded model from installed packages alone: `python -m benchmarks.tiny_model.train [--output FOLDER]`.

The result is the folder of a diffusers `StableDiffusion3Pipeline`. There are three phases:

1. a small KL autoencoder;
2. rectified flow matching with correct captions; the text encoders are trained together with the transformer;
3. rectified flow matching with partly wrong captions, which leaves something to learn from a reward.

Every phase has its own seed, optimizer and number of steps, so two runs on one machine give the same model.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Regex, Tokenizer, models, normalizers, processors
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from diffusion_grpo.tiny import COLORS, PATH, make_prompt, words

from .render import corrupt, draw_word, random_word

TOKENS = 25  # start + `the word "RAINSX" in orange` + end: the longest prompt there is
NUM_IMAGES = 20480
AUTOENCODER_STEPS, AUTOENCODER_BATCH = 700, 16
CLEAN_STEPS, WRONG_STEPS, BATCH = 2200, 500, 64
WRONG_LETTERS = WRONG_COLORS = 0.15
EMPTY_PROMPTS = 0.1

Caption = tuple[str, str]  # word, colour


def character_tokenizer() -> CLIPTokenizer:
    """Build a CLIP tokenizer without merges: one token per character, with separate ones at the end of a word."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-"
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=TOKENS
    )


def absent_t5() -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Build a stand-in for SD3's T5: an encoder whose output is exactly zero, as SD3 feeds when it has none.

    `StableDiffusion3Pipeline.from_pretrained` insists on a third text encoder and tokenizer unless the caller passes
    `None` for both, and this folder should load without arguments. The tokenizer returns one end token for any text.
    """
    config = T5Config(
        vocab_size=2, d_model=128, d_kv=1, d_ff=1, num_layers=1, num_heads=1, eos_token_id=0, pad_token_id=1
    )
    encoder = T5EncoderModel(config).requires_grad_(False).eval()
    encoder.encoder.final_layer_norm.weight.zero_()
    backend = Tokenizer(models.WordLevel({"</s>": 0, "<pad>": 1}, unk_token="<pad>"))
    backend.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    return encoder, PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def build_pipeline() -> StableDiffusion3Pipeline:
    """Build the untrained pipeline of 3.5 million parameters."""
    transformer = SD3Transformer2DModel(
        sample_size=24,
        patch_size=2,
        in_channels=6,
        out_channels=6,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=12,
    )
    vae = _autoencoder()
    text_encoders = [_text_encoder() for _ in range(2)]
    t5, t5_tokenizer = absent_t5()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=text_encoders[0],
        tokenizer=character_tokenizer(),
        text_encoder_2=text_encoders[1],
        tokenizer_2=character_tokenizer(),
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    )


def _text_encoder() -> CLIPTextModelWithProjection:
    tokenizer = character_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        latent_channels=6,
        norm_num_groups=8,
        sample_size=96,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_images(count: int, seed: int) -> tuple[Tensor, list[Caption]]:
    """Draw images, uint8 `(count, 3, 32, 96)`, and return them with their captions."""
    generator = random.Random(seed)
    known, held_out = words("train"), set(words("test"))
    captions = [(random_word(generator, known, held_out), generator.choice(list(COLORS))) for _ in range(count)]
    images = np.stack([np.asarray(draw_word(word, color, generator)) for word, color in captions])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), captions


def optimize(name: str, parameters: list, steps: int, lr: float, loss_of: Callable[[], Tensor]) -> None:
    """Run AdamW with a short warm-up and a linear decay to 5 %; print the mean loss of every hundred steps."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1.0) * (1 - 0.95 * step / steps)
    )
    started, total = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 100 == 0:
            print(f"{name} {step}/{steps} loss {total / 100:.4f} {time.monotonic() - started:.0f} s", flush=True)
            total = 0.0


def train_autoencoder(vae: AutoencoderKL, images: Tensor, seed: int = 1) -> None:
    """Train on reconstruction plus a weak KL term towards a unit normal, then set scaling and shift."""
    torch.manual_seed(seed)

    def loss_of() -> Tensor:
        batch = images[torch.randint(len(images), (AUTOENCODER_BATCH,))].float() / 127.5 - 1
        batch = batch.contiguous(memory_format=torch.channels_last)  # a third faster on a CPU
        posterior = vae.encode(batch).latent_dist
        error = vae.decode(posterior.sample()).sample - batch
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return error.square().mean() + 0.1 * error.abs().mean() + 2e-4 * kl

    vae.train().to(memory_format=torch.channels_last)
    optimize("autoencoder", list(vae.parameters()), AUTOENCODER_STEPS, 2e-3, loss_of)
    vae.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)
    sample = images[:512]
    latents = encode(vae, sample)
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    decoded = torch.cat([vae.decode(chunk).sample for chunk in latents.split(64)]).clamp(-1, 1)
    error = (decoded / 2 - (sample.float() / 255 - 0.5)).square().mean()
    print(f"autoencoder {-10 * error.log10().item():.1f} dB, latent std by channel {latents.std((0, 2, 3)).tolist()}")


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Return the mean latents `(count, 6, 8, 24)` of uint8 images, neither shifted nor scaled."""
    return torch.cat([vae.encode(chunk.float() / 127.5 - 1).latent_dist.mode() for chunk in images.split(64)])


def encode_prompts(pipe: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Call the pipeline's `encode_prompt` with `max_sequence_length=1`, but with gradients."""
    embeds, _, pooled, _ = type(pipe).encode_prompt(
        pipe, prompts, prompts, prompts, do_classifier_free_guidance=False, max_sequence_length=1
    )
    return embeds, pooled


def train_flow(
    pipe: StableDiffusion3Pipeline, images: Tensor, captions: list[Caption], name: str, steps: int, lr: float,
    wrong: tuple[float, float], seed: int,
) -> None:  # fmt: skip
    """Train transformer and text encoders by rectified flow matching; `wrong`: shares of wrong letters and colours."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    latents = (encode(pipe.vae, images) - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    trained = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]

    def prompt_of(index: int) -> str:
        if generator.random() < EMPTY_PROMPTS:
            return ""
        return make_prompt(*corrupt(*captions[index], *wrong, generator))

    def loss_of() -> Tensor:
        rows = torch.randint(len(latents), (BATCH,))
        embeds, pooled = encode_prompts(pipe, [prompt_of(row) for row in rows.tolist()])
        clean = latents[rows]
        noise = torch.randn_like(clean)
        sigma = torch.sigmoid(0.4 + 1.2 * torch.randn(BATCH))
        at = sigma.view(-1, 1, 1, 1)
        predicted = pipe.transformer(
            hidden_states=(1 - at) * clean + at * noise,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            timestep=1000 * sigma,
        ).sample
        return F.mse_loss(predicted, noise - clean)

    for module in trained:
        module.train()
    optimize(name, [parameter for module in trained for parameter in module.parameters()], steps, lr, loss_of)
    for module in trained:
        module.eval()


def train(
    save: Callable[[str, StableDiffusion3Pipeline], None] = lambda phase, pipe: None,
) -> StableDiffusion3Pipeline:
    """Run the three phases; call `save` with the name of the phase and the pipeline after each."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    pipe = build_pipeline()
    images, captions = make_images(NUM_IMAGES, seed=0)
    train_autoencoder(pipe.vae, images)
    save("autoencoder", pipe)
    train_flow(pipe, images, captions, "correct captions", CLEAN_STEPS, 1e-3, (0.0, 0.0), seed=2)
    save("correct", pipe)
    train_flow(pipe, images, captions, "wrong captions", WRONG_STEPS, 3e-4, (WRONG_LETTERS, WRONG_COLORS), seed=3)
    save("wrong", pipe)
    return pipe


def main() -> None:
    """Train the model and write its folder: `make tiny-model`."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument(
        "--output", type=Path, default=PATH, help="folder of the pipeline (default: the package's own)"
    )
    parser.add_argument("--phases", type=Path, help="also keep the pipeline after each phase in this folder")
    arguments = parser.parse_args()

    def save(phase: str, pipe: StableDiffusion3Pipeline) -> None:
        if arguments.phases:
            pipe.save_pretrained(arguments.phases / phase)

    train(save).save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
