"""ImageReward against BLIP's forward pass, written out in float64, from a checkpoint with BLIP's names."""

import torch
import torch.nn.functional as F
from formulas import linear, norm, scored, torchvision_square
from tiny_scorers import IMAGES, PROMPTS, SIDE, bert_tokenizer, chain, med_config

WIDE = 128  # two heads of 64


def blip_weights(vocabulary):
    torch.manual_seed(2)
    weights = {  # small states in front, so that what a norm adds to the variance counts
        "blip.visual_encoder.cls_token": torch.randn(1, 1, WIDE) / 100,
        "blip.visual_encoder.pos_embed": torch.randn(1, (SIDE // 16) ** 2 + 1, WIDE) / 100,
        "blip.visual_encoder.patch_embed.proj.weight": torch.randn(WIDE, 3, 16, 16) / 2800,
        "blip.visual_encoder.patch_embed.proj.bias": torch.randn(WIDE) / 100,
        "blip.vision_proj.weight": torch.randn(4, WIDE),
        "blip.text_encoder.embeddings.position_ids": torch.arange(40)[None],
        "blip.text_encoder.embeddings.word_embeddings.weight": torch.randn(vocabulary, 32),
        "blip.text_encoder.embeddings.position_embeddings.weight": torch.randn(40, 32),
    }

    def add(name, outer, inner=None):
        weights[f"{name}.weight"] = (
            1 + torch.randn(outer) / 10 if inner is None else torch.randn(outer, inner) / inner**0.5
        )
        weights[f"{name}.bias"] = torch.randn(outer) / 10

    add("blip.visual_encoder.norm", WIDE)
    add("blip.text_encoder.embeddings.LayerNorm", 32)
    for layer in range(2):
        block = f"blip.visual_encoder.blocks.{layer}."
        shapes = {"norm1": (WIDE,), "norm2": (WIDE,), "attn.qkv": (3 * WIDE, WIDE), "attn.proj": (WIDE, WIDE)}
        for name, shape in {**shapes, "mlp.fc1": (48, WIDE), "mlp.fc2": (WIDE, 48)}.items():
            add(block + name, *shape)
        block = f"blip.text_encoder.encoder.layer.{layer}."
        for kind, width in (("attention", 32), ("crossattention", WIDE)):
            add(f"{block}{kind}.self.query", 32, 32)
            add(f"{block}{kind}.self.key", 32, width)
            add(f"{block}{kind}.self.value", 32, width)
            add(f"{block}{kind}.output.dense", 32, 32)
            add(f"{block}{kind}.output.LayerNorm", 32)
        add(f"{block}intermediate.dense", 48, 32)
        add(f"{block}output.dense", 32, 48)
        add(f"{block}output.LayerNorm", 32)
    return weights | chain(32, "mlp.layers.")


def attend(query, key, value, heads):
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    shares = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1)
    return (shares @ value).transpose(1, 2).flatten(2)


def image_reward(image, ids, weights):
    see = {k.removeprefix(p): v for k, v in weights.items() if k.startswith(p := "blip.visual_encoder.")}
    pixels = torchvision_square(image, SIDE, SIDE)[None]
    states = F.conv2d(pixels, see["patch_embed.proj.weight"], see["patch_embed.proj.bias"], stride=16).flatten(2).mT
    states = torch.cat([see["cls_token"], states], 1) + see["pos_embed"]
    for layer in range(2):
        own = {k.removeprefix(p): v for k, v in see.items() if k.startswith(p := f"blocks.{layer}.")}
        query, key, value = linear(norm(states, own, "norm1", 1e-6), own, "attn.qkv").chunk(3, -1)
        states = states + linear(attend(query, key, value, 2), own, "attn.proj")
        inner = F.gelu(linear(norm(states, own, "norm2", 1e-6), own, "mlp.fc1"))
        states = states + linear(inner, own, "mlp.fc2")
    picture = norm(states, see, "norm", 1e-6)
    text = {k.removeprefix(p): v for k, v in weights.items() if k.startswith(p := "blip.text_encoder.")}
    states = text["embeddings.word_embeddings.weight"][ids] + text["embeddings.position_embeddings.weight"][: len(ids)]
    states = norm(states[None], text, "embeddings.LayerNorm", 1e-12)
    for layer in range(2):
        own = {k.removeprefix(p): v for k, v in text.items() if k.startswith(p := f"encoder.layer.{layer}.")}
        for kind, source in (("attention", None), ("crossattention", picture)):
            source = states if source is None else source
            parts = [
                linear(x, own, f"{kind}.self.{n}") for x, n in ((states, "query"), (source, "key"), (source, "value"))
            ]
            inner = linear(attend(*parts, 2), own, f"{kind}.output.dense")
            states = norm(states + inner, own, f"{kind}.output.LayerNorm", 1e-12)
        inner = linear(F.gelu(linear(states, own, "intermediate.dense")), own, "output.dense")
        states = norm(states + inner, own, "output.LayerNorm", 1e-12)
    value = states[:, 0]
    for number in (0, 2, 4, 6, 7):
        value = linear(value, weights, f"mlp.layers.{number}")
    return (value[0, 0] - 0.16717362830052426) / 1.0333394966054072


@torch.no_grad()
def test_imagereward(tmp_path) -> None:
    tokenizer = bert_tokenizer(tmp_path)
    weights = blip_weights(len(tokenizer))
    torch.save(weights, tmp_path / "ImageReward.pt")
    med_config(tmp_path, len(tokenizer))
    exact = {name: weight.double() for name, weight in weights.items() if weight.is_floating_point()}
    lists = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert max(map(len, lists)) > 35
    lists = [ids if len(ids) <= 35 else [*ids[:34], tokenizer.sep_token_id] for ids in lists]
    expected = torch.stack([image_reward(image, torch.tensor(ids), exact) for image, ids in zip(IMAGES, lists)])
    assert expected.std() > 0.01
    found = scored("imagereward", {"model": str(tmp_path), "tokenizer": str(tmp_path)})
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.save(weights, tmp_path / "renamed.pt")
    again = scored("imagereward", {"model": str(tmp_path), "tokenizer": str(tmp_path), "filename": "renamed.pt"})
    assert torch.equal(again, found)
