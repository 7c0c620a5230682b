"""HPSv2 against open_clip's forward pass, written out in float64, from a checkpoint with open_clip's names."""

import math

import pytest
import torch
import torch.nn.functional as F
from formulas import norm, normal, scored, tensor64, unit
from tiny_pipelines import clip_tokenizer
from tiny_scorers import IMAGES, PATCH, PROMPTS, SIDE, clip, clip_config


def open_clip_weights():
    torch.manual_seed(1)
    widths = {"visual.": 16, "": 16}
    weights = {
        "positional_embedding": torch.randn(77, 16),
        "text_projection": torch.randn(16, 12) / 4,
        "logit_scale": torch.tensor(4.0),
        "token_embedding.weight": torch.randn(len(clip_tokenizer()), 16),
        "visual.class_embedding": torch.randn(16),
        "visual.positional_embedding": torch.randn((SIDE // PATCH) ** 2 + 1, 16),
        "visual.proj": torch.randn(16, 12) / 4,
        "visual.conv1.weight": torch.randn(16, 3, PATCH, PATCH) / 14,
    }
    for part in ("ln_final", "visual.ln_pre", "visual.ln_post"):
        weights |= {f"{part}.weight": 1 + 0.1 * torch.randn(16), f"{part}.bias": 0.1 * torch.randn(16)}
    for tower, width in widths.items():
        for layer in range(2):
            block = f"{tower}transformer.resblocks.{layer}."
            for part in ("ln_1", "ln_2"):
                weights |= {f"{block}{part}.weight": 1 + 0.1 * torch.randn(width)}
                weights |= {f"{block}{part}.bias": 0.1 * torch.randn(width)}
            shapes = {
                "attn.in_proj_": (48, 16),
                "attn.out_proj.": (16, 16),
                "mlp.c_fc.": (24, 16),
                "mlp.c_proj.": (16, 24),
            }
            for name, shape in shapes.items():
                weights |= {
                    f"{block}{name}weight": torch.randn(shape) / 4,
                    f"{block}{name}bias": torch.randn(shape[0]),
                }
    return weights


def open_clip_blocks(states, weights, tower, heads, mask=None):
    for layer in range(2):
        own = {
            k.removeprefix(p): v
            for k, v in weights.items()
            if k.startswith(p := f"{tower}transformer.resblocks.{layer}.")
        }
        attention = torch.nn.MultiheadAttention(states.shape[-1], heads, batch_first=True).double()
        attention.load_state_dict({k.removeprefix("attn."): v for k, v in own.items() if k.startswith("attn.")})
        inner = norm(states, own, "ln_1")
        states = states + attention(inner, inner, inner, need_weights=False, attn_mask=mask)[0]
        inner = F.gelu(F.linear(norm(states, own, "ln_2"), own["mlp.c_fc.weight"], own["mlp.c_fc.bias"]))
        states = states + F.linear(inner, own["mlp.c_proj.weight"], own["mlp.c_proj.bias"])
    return states


def hps_pixels(image, antialias):
    """ToTensor, ResizeMaxSize(fill=0), Normalize, as the authors' fork of open_clip has them."""
    scale = SIDE / max(image.size)
    height, width = round(image.height * scale), round(image.width * scale)
    pixels = F.interpolate(tensor64(image)[None], (height, width), mode="bicubic", antialias=antialias)
    square = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.float64)
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    square[:, :, top : top + height, left : left + width] = pixels
    return normal(square)


def hps_cosine(image, prompt, weights, antialias):
    tokenizer = clip_tokenizer()
    ids = tokenizer(prompt)["input_ids"]
    ids = torch.tensor(ids if len(ids) <= 77 else [*ids[:76], tokenizer.eos_token_id])
    states = F.conv2d(hps_pixels(image, antialias), weights["visual.conv1.weight"], stride=PATCH).flatten(2).mT
    states = torch.cat([weights["visual.class_embedding"].expand(1, 1, -1), states], 1)
    states = norm(states + weights["visual.positional_embedding"], weights, "visual.ln_pre")
    states = open_clip_blocks(states, weights, "visual.", 2)
    seen = norm(states[:, 0], weights, "visual.ln_post") @ weights["visual.proj"]
    padded = F.pad(ids, (0, 77 - len(ids)))  # open_clip pads with 0 and takes the place of the highest id
    states = (weights["token_embedding.weight"][padded] + weights["positional_embedding"])[None]
    mask = torch.full((77, 77), -math.inf, dtype=torch.float64).triu(1)
    states = norm(open_clip_blocks(states, weights, "", 2, mask), weights, "ln_final")
    return (unit(seen) * unit(states[:, padded.argmax()] @ weights["text_projection"])).sum()


@torch.no_grad()
def test_hpsv2_from_an_open_clip_checkpoint(tmp_path) -> None:
    weights = open_clip_weights()
    torch.save({"epoch": 1, "name": "hps", "state_dict": weights}, tmp_path / "HPS_v2.1_compressed.pt")
    torch.save({"state_dict": weights}, tmp_path / "other.pt")
    clip_config("gelu").save_pretrained(tmp_path)
    clip_tokenizer().save_pretrained(tmp_path)
    exact = {name: weight.double() for name, weight in weights.items()}
    options = {"model": str(tmp_path), "processor": str(tmp_path)}
    for antialias, other in ((True, {}), (False, {"antialias": False, "filename": "other.pt"})):
        expected = torch.stack([hps_cosine(i, p, exact, antialias) for i, p in zip(IMAGES, PROMPTS)])
        assert expected.std() > 0.01
        torch.testing.assert_close(scored("hpsv2", {**options, **other}), expected, rtol=0, atol=1e-5)
    messy = scored("hpsv2", options, IMAGES[:1], ["a  red\n &amp;amp; cat "])
    assert messy.item() == pytest.approx(hps_cosine(IMAGES[0], "a red & cat", exact, True).item(), abs=1e-5)


@torch.no_grad()
def test_hpsv2_as_a_model_of_transformers(tmp_path) -> None:
    model = clip(tmp_path, "gelu").double()
    found = scored("hpsv2", {"model": str(tmp_path), "processor": str(tmp_path), "filename": None})
    pixels = torch.cat([hps_pixels(image, True) for image in IMAGES])
    seen = unit(model.visual_projection(model.vision_model(pixels).pooler_output))
    ids = [torch.tensor([clip_tokenizer()(PROMPTS[0])["input_ids"]])]
    text_features = unit(model.text_projection(model.text_model(input_ids=ids[0]).pooler_output))
    assert found[0].item() == pytest.approx((seen[0] @ text_features[0]).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("ln_final.weight"), "missing_keys.*text_model.final_layer_norm.weight"),
        (lambda weights: weights.update(extra=torch.ones(1)), "'extra', which is not a weight of an open_clip ViT"),
    ],
    ids=["missing", "unknown"],
)
def test_another_checkpoint_is_refused(tmp_path, change, message) -> None:
    weights = open_clip_weights()
    change(weights)
    torch.save({"state_dict": weights}, tmp_path / "HPS_v2.1_compressed.pt")
    clip_config("gelu").save_pretrained(tmp_path)
    clip_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=message):
        scored("hpsv2", {"model": str(tmp_path), "processor": str(tmp_path)})
