"""Rewards by published image models against their published formulas, written out here in float64.

On tiny random models of the same architecture whose files have the originals' names and form; `rewards verify` is for
the real weights.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from PIL import Image
from tiny_pipelines import clip_tokenizer
from tiny_scorers import IMAGES, MEAN, PATCH, PROMPTS, SIDE, STD, bert_tokenizer, chain, clip, clip_config, med_config

from diffusion_grpo.rewards import REWARDS, load_rewards, score

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def scored(name, options, images=IMAGES, prompts=PROMPTS, **columns):
    """What a run makes of it; three at a time, so that batches are cut."""
    rewards = load_rewards({name: {"device": "cpu", "batch_size": 3, **options}})
    return score(rewards, images=images, prompts=prompts, columns=columns)[:, 0].double()


def tensor64(image):
    return torch.from_numpy(np.asarray(image.convert("RGB")).astype(np.float64) / 255).permute(2, 0, 1)


def normal(pixels, mean=MEAN, std=STD):
    return (pixels - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[:, None, None]


def torchvision_square(image, resize, crop, mean=MEAN, std=STD):
    """Resize(resize, BICUBIC), CenterCrop(crop), ToTensor, Normalize."""
    short, long = sorted(image.size)
    sides = {short: resize, long: int(resize * long / short)}
    image = image.convert("RGB").resize((sides[image.width], sides[image.height]), Image.Resampling.BICUBIC)
    top, left = (int(round((side - crop) / 2.0)) for side in (image.height, image.width))
    return normal(tensor64(image)[:, top : top + crop, left : left + crop], mean, std)


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def transformers_square(image):
    """transformers' CLIP image processor: as torchvision's, but the crop's corner is rounded down."""
    short, long = sorted(image.size)
    sides = {short: SIDE, long: int(SIDE * long / short)}
    image = image.resize((sides[image.width], sides[image.height]), Image.Resampling.BICUBIC)
    top, left = (image.height - SIDE) // 2, (image.width - SIDE) // 2
    return normal(tensor64(image)[:, top : top + SIDE, left : left + SIDE])


def clip_cosines(model, images, prompts):
    """cos(picture, prompt) by transformers' CLIP, prompts cut off at 77 tokens."""
    tokenizer, model = clip_tokenizer(), model.double()
    values = []
    for image, prompt in zip(images, prompts):
        ids = tokenizer(prompt)["input_ids"]
        ids = ids if len(ids) <= 77 else [*ids[:76], tokenizer.eos_token_id]
        states = model.text_model(input_ids=torch.tensor([ids])).last_hidden_state[:, -1]
        said = unit(states @ model.text_projection.weight.T)
        pixels = transformers_square(image)[None]
        seen = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
        values.append((seen * said).sum())
    return torch.stack(values)


@torch.no_grad()
def test_clip_score_and_pickscore(tmp_path) -> None:
    model = clip(tmp_path)
    cosines = clip_cosines(model, IMAGES, PROMPTS)
    assert cosines.std() > 0.01 and (cosines < 0).any() and len(clip_tokenizer()(PROMPTS[1])["input_ids"]) > 77
    found = scored("clip_score", {"model": str(tmp_path)})
    torch.testing.assert_close(found, (100 * cosines).clamp(min=0), rtol=0, atol=1e-3)
    found = scored("pickscore", {"model": str(tmp_path), "processor": str(tmp_path)})
    torch.testing.assert_close(found, math.exp(3.0) * cosines, rtol=0, atol=2e-4)
    found = scored("pickscore", {"model": str(tmp_path), "processor": str(tmp_path), "std": 26})  # Flow-GRPO's
    torch.testing.assert_close(found, math.exp(3.0) * cosines / 26, rtol=0, atol=1e-5)


@torch.no_grad()
def test_clip_similarity(tmp_path) -> None:
    model = clip(tmp_path).double()
    pixels = torch.stack([transformers_square(image) for image in IMAGES])
    seen = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
    IMAGES[3].save(tmp_path / "other.png")
    others = [IMAGES[1], None, IMAGES[2], str(tmp_path / "other.png")]
    found = scored("clip_similarity", {"model": str(tmp_path), "target_column": "other"}, other=others)
    assert found[1].isnan() and found[2:].tolist() == pytest.approx([1, 1], abs=1e-6)
    assert found[0].item() == pytest.approx((seen[0] @ seen[1]).item(), abs=1e-5)


def test_the_preprocessing_is_pillows_with_torchvision_too(tmp_path, monkeypatch) -> None:
    """transformers would take torchvision's resize where it is installed, and give other scores."""
    asked = {}
    real = tf.AutoImageProcessor.from_pretrained
    monkeypatch.setattr(
        tf.AutoImageProcessor, "from_pretrained", lambda *args, **kw: asked.update(kw) or real(*args, **kw)
    )
    clip(tmp_path)
    scored("clip_score", {"model": str(tmp_path), "revision": "v1"})
    assert asked == {"revision": "v1", "backend": "pil"}


# HPSv2: open_clip's names and forward pass


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
    for norm in ("ln_final", "visual.ln_pre", "visual.ln_post"):
        weights |= {f"{norm}.weight": 1 + 0.1 * torch.randn(16), f"{norm}.bias": 0.1 * torch.randn(16)}
    for tower, width in widths.items():
        for layer in range(2):
            block = f"{tower}transformer.resblocks.{layer}."
            for norm in ("ln_1", "ln_2"):
                weights |= {f"{block}{norm}.weight": 1 + 0.1 * torch.randn(width)}
                weights |= {f"{block}{norm}.bias": 0.1 * torch.randn(width)}
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


def norm(states, weights, name, eps=1e-5):
    return F.layer_norm(states, states.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


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
    said = unit(model.text_projection(model.text_model(input_ids=ids[0]).pooler_output))
    assert found[0].item() == pytest.approx((seen[0] @ said[0]).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("ln_final.weight"), "missing_keys.*text_model.final_layer_norm.weight"),
        (lambda weights: weights.update(extra=torch.ones(1)), "'extra', which is not a weight of an open_clip ViT"),
        (lambda weights: weights.update({"transformer.resblocks.0.ls_1.gamma": torch.ones(1)}), "'ls_1.gamma'"),
        (lambda weights: weights.update({"visual.proj": torch.ones(16, 5)}), "does not fit|mismatch"),
    ],
    ids=["missing", "unknown", "unknown in a block", "shape"],
)
def test_another_checkpoint_is_refused(tmp_path, change, message) -> None:
    weights = open_clip_weights()
    change(weights)
    torch.save({"state_dict": weights}, tmp_path / "HPS_v2.1_compressed.pt")
    clip_config("gelu").save_pretrained(tmp_path)
    clip_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=message):
        scored("hpsv2", {"model": str(tmp_path), "processor": str(tmp_path)})


# ImageReward: BLIP's names and forward pass

WIDE = 128  # two heads of 64


def blip_weights(vocabulary):
    torch.manual_seed(2)
    weights = {
        "blip.visual_encoder.cls_token": torch.randn(1, 1, WIDE),
        "blip.visual_encoder.pos_embed": torch.randn(1, (SIDE // 16) ** 2 + 1, WIDE),
        "blip.visual_encoder.patch_embed.proj.weight": torch.randn(WIDE, 3, 16, 16) / 28,
        "blip.visual_encoder.patch_embed.proj.bias": torch.randn(WIDE) / 10,
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


def linear(states, weights, name):
    return F.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])


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


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_aesthetic(tmp_path, suffix) -> None:
    model = clip(tmp_path / "clip").double()
    weights = chain(12, "layers.")
    torch.save(weights, tmp_path / "mlp.pth")
    if suffix == "safetensors":
        from safetensors.torch import save_file

        save_file(weights, tmp_path / "mlp.safetensors")
    pixels = torch.stack([torchvision_square(image, SIDE, SIDE) for image in IMAGES])
    expected = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
    for number in (0, 2, 4, 6, 7):
        expected = linear(expected, {name: each.double() for name, each in weights.items()}, f"layers.{number}")
    options = {"model": str(tmp_path), "filename": f"mlp.{suffix}", "backbone": str(tmp_path / "clip")}
    torch.testing.assert_close(scored("aesthetic", options), expected[:, 0], rtol=0, atol=1e-5)


# LPIPS: torchvision's AlexNet and VGG-16

ALEX = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
VGG_PLACES = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
VGG_WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


def lpips_files(folder, net):
    torch.manual_seed(3)
    widths = (3, *VGG_WIDTHS)
    shapes = ALEX if net == "alex" else {p: (b, a, 3) for p, a, b in zip(VGG_PLACES, widths, VGG_WIDTHS)}
    features = {}
    for place, (outer, inner, side) in shapes.items():
        features[f"features.{place}.weight"] = torch.randn(outer, inner, side, side) / (inner * side * side / 2) ** 0.5
        features[f"features.{place}.bias"] = torch.randn(outer) / 10
    features["classifier.1.weight"] = torch.zeros(1)
    name = {"alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth"}[net]
    torch.save(features, folder / name)
    tapped = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}[net]
    linear = {f"lin{n}.model.1.weight": torch.rand(1, width, 1, 1) for n, width in enumerate(tapped)}
    torch.save(linear, folder / f"{net}.pth")
    return {key: each.double() for key, each in features.items()}, [
        each.double()[0, :, 0, 0] for each in linear.values()
    ]


def lpips_maps(image, net, w):
    x = (
        2 * tensor64(image)[None] - 1 - torch.tensor([-0.030, -0.088, -0.188]).double()[:, None, None]
    ) / torch.tensor([0.458, 0.448, 0.450]).double()[:, None, None]

    def conv(x, place, **how):
        return F.relu(F.conv2d(x, w[f"features.{place}.weight"], w[f"features.{place}.bias"], **how))

    if net == "alex":
        maps = [conv(x, 0, stride=4, padding=2)]
        maps.append(conv(F.max_pool2d(maps[-1], 3, 2), 3, padding=2))
        maps.append(conv(F.max_pool2d(maps[-1], 3, 2), 6, padding=1))
        maps.append(conv(maps[-1], 8, padding=1))
        return [*maps, conv(maps[-1], 10, padding=1)]
    maps = []
    for places in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)):
        x = F.max_pool2d(maps[-1], 2, 2) if maps else x
        for place in places:
            x = conv(x, place, padding=1)
        maps.append(x)
    return maps


def lpips_distance(one, two, net, w, linear):
    distance = 0
    for a, b, own in zip(lpips_maps(one, net, w), lpips_maps(two, net, w), linear):
        a, b = (x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10) for x in (a, b))
        distance += ((a - b).square() * own[:, None, None]).sum(1).mean()
    return distance


@torch.no_grad()
@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips(tmp_path, net) -> None:
    weights, linear = lpips_files(tmp_path, net)
    pictures = [image.resize((48, 40)) for image in IMAGES[:2]] + [IMAGES[2]]
    others = [pictures[1], IMAGES[3], None]  # the second has another size
    fitted = [others[0], others[1].resize((48, 40), Image.Resampling.LANCZOS)]
    expected = [1 - lpips_distance(a, b, net, weights, linear) for a, b in zip(pictures, fitted)]
    options = {"model": str(tmp_path), "net": net}
    found = scored("lpips", options, pictures, PROMPTS[:3], target=others)
    torch.testing.assert_close(found[:2], torch.stack(expected), rtol=0, atol=1e-4)
    assert found[2].isnan() and expected[0] < 0.99
    assert scored("lpips", options, pictures, PROMPTS[:3], target=pictures).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="at least 32 x 32 pixels"):
        scored("lpips", options, [IMAGES[0].resize((64, 16))], PROMPTS[:1], target=[IMAGES[0]])


def test_lpips_downloads_the_official_files_once(tmp_path, monkeypatch) -> None:
    asked = []
    lpips_files(tmp_path, "alex")

    def download(url, path, progress):
        asked.append(url)
        torch.save(torch.load(tmp_path / url.rpartition("/")[2]), path)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    for _ in range(2):
        assert scored("lpips", {}, IMAGES[:1], PROMPTS[:1], target=IMAGES[:1]).tolist() == [1]
    assert [url.rpartition("/")[2] for url in asked] == ["alexnet-owt-7be5be79.pth", "alex.pth"]


@torch.no_grad()
@pytest.mark.parametrize("family", ["dino", "dinov2"])
def test_dino_similarity(tmp_path, family) -> None:
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 224, "patch_size": 56}
    if family == "dino":
        model = tf.ViTModel(tf.ViTConfig(**sizes, intermediate_size=24), add_pooling_layer=False)
    else:
        model = tf.Dinov2Model(tf.Dinov2Config(**sizes, mlp_ratio=2))
    model.save_pretrained(tmp_path)
    model = model.double().eval()
    pixels = torch.stack([torchvision_square(image, 256, 224, *IMAGENET) for image in IMAGES])
    seen = unit(model(pixels).last_hidden_state[:, 0])
    others = [IMAGES[1], IMAGES[2], None, IMAGES[3]]
    found = scored("dino_similarity", {"model": str(tmp_path), "target_column": "o"}, o=others)
    expected = [(seen[0] @ seen[1]).item(), (seen[1] @ seen[2]).item(), 1.0]
    assert found[[0, 1, 3]].tolist() == pytest.approx(expected, abs=1e-5) and found[2].isnan()
    assert expected[0] < 0.9999


@torch.no_grad()
def test_nsfw_filter_as_a_reward_and_as_a_mask(tmp_path) -> None:
    torch.manual_seed(5)
    labels = {0: "drawings", 1: "normal", 2: "porn"}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    config = tf.ViTConfig(**sizes, intermediate_size=24, id2label=labels, label2id={v: k for k, v in labels.items()})
    model = tf.ViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(tmp_path)
    tf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    images = [image.resize((32, 32)) for image in IMAGES]
    pixels = torch.stack([2 * tensor64(image) - 1 for image in images])
    chances = torch.softmax(model.double()(pixels).logits, -1)
    options = {"model": str(tmp_path), "unsafe_labels": ["porn", "drawings"]}
    found = scored("nsfw_filter", options, images)
    torch.testing.assert_close(found, chances[:, 1], rtol=0, atol=1e-5)
    pass_mark = chances[:, 1].median().item() + 1e-9
    mask = scored("nsfw_filter", {**options, "threshold": pass_mark}, images)
    assert mask.tolist() == [float(chance >= pass_mark) for chance in chances[:, 1]] and 0 < mask.sum() < 4
    with pytest.raises(RuntimeError, match=r"has the classes drawings, normal, porn; unsafe_labels is \['nsfw'\]"):
        scored("nsfw_filter", {"model": str(tmp_path)}, images)


MODELS = [
    "clip_score",
    "pickscore",
    "hpsv2",
    "imagereward",
    "aesthetic",
    "lpips",
    "dino_similarity",
    "clip_similarity",
]


@pytest.mark.parametrize("name", [*MODELS, "nsfw_filter"])
def test_every_one_has_the_common_settings_and_loads_late(name) -> None:
    common = {"device": "cpu", "dtype": "bfloat16", "batch_size": 2, "revision": "abc", "offload": True}
    (reward,) = load_rewards({name: {"model": "owner/does-not-exist", **common}})
    assert isinstance(reward.function, REWARDS[name]) and reward.function.torch_dtype == torch.bfloat16
    assert load_rewards(name)[0].function == REWARDS[name]()


@torch.no_grad()
def test_in_bfloat16_the_score_is_near(tmp_path) -> None:
    clip(tmp_path)
    exact = scored("clip_score", {"model": str(tmp_path)})
    half = scored("clip_score", {"model": str(tmp_path), "dtype": "bfloat16"})
    assert 0 < (exact - half).abs().max() < 3
