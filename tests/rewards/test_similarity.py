"""The rewards `ssim`, `psnr` and `lpips`, against formulas."""

import urllib.error

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from formulas import scored, tensor64
from huggingface_hub import constants
from PIL import Image, ImageFilter
from plain_images import flat, noise, save_turned
from tiny_scorers import IMAGES, PROMPTS

from diffusion_grpo.rewards import REWARDS, load_rewards, score


def reference_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """The formula window by window, as in the paper."""
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2, values = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            cov = (window * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
            )
    return float(np.mean(values))


def test_ssim_is_the_published_formula() -> None:
    image = noise().filter(ImageFilter.GaussianBlur(1))
    other = image.filter(ImageFilter.GaussianBlur(2))
    luma, smooth = (np.asarray(p.convert("L"), dtype=np.float64) for p in (image, other))
    wanted = reference_ssim(luma, smooth)
    assert 0 < wanted < 0.95
    targets = [other, image, noise(), None]
    values = REWARDS["ssim"](images=[image] * 4, target=targets)
    assert values[:2] == pytest.approx([wanted, 1], abs=1e-12) and values[2] < 0.3 and values[3] is None
    (grey,) = REWARDS["ssim"](images=[flat(100)], goal=[flat(150)], target_column="goal")
    assert grey == pytest.approx((2 * 100 * 150 + 6.5025) / (100**2 + 150**2 + 6.5025))


def test_ssim_needs_one_whole_window() -> None:
    one, two = (noise().resize((11, side)) for side in (11, 12))
    luma = [np.asarray(image.convert("L"), dtype=np.float64) for image in (one, two.resize((11, 11), Image.LANCZOS))]
    assert REWARDS["ssim"](images=[one], target=[two]) == [pytest.approx(reference_ssim(*luma), abs=1e-12)]
    with pytest.raises(ValueError, match="win_size"):
        REWARDS["ssim"](images=[one.resize((11, 10))], target=[two])


def test_psnr_of_known_errors() -> None:
    values = REWARDS["psnr"](images=[flat(100)] * 4, target=[flat(101), flat(110), flat(100), None])
    assert values == [pytest.approx(48.1308, abs=1e-4), pytest.approx(28.1308, abs=1e-4), 100.0, None]


@pytest.mark.parametrize("name", ["ssim", "psnr"])
def test_a_target_may_be_a_file_of_another_size(name, tmp_path) -> None:
    image = noise().filter(ImageFilter.GaussianBlur(3))
    turned = REWARDS[name](images=[image] * 2, target=[save_turned(image, tmp_path / "turned.png"), image])
    assert turned[0] == turned[1]  # upright, as `datasets.Image` reads it
    image.resize((64, 48), Image.Resampling.LANCZOS).save(tmp_path / "large.png")
    (near,) = REWARDS[name](images=[image], target=[str(tmp_path / "large.png")])
    (far,) = REWARDS[name](images=[image], target=[noise()])
    assert near > far and near > {"ssim": 0.98, "psnr": 35}[name]


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
    images = [image.resize((48, 40)) for image in IMAGES[:2]] + [IMAGES[2]]
    others = [images[1], IMAGES[3], None]  # the second has another size
    fitted = [others[0], others[1].resize((48, 40), Image.Resampling.LANCZOS)]
    expected = [1 - lpips_distance(a, b, net, weights, linear) for a, b in zip(images, fitted)]
    options = {"model": str(tmp_path), "net": net}
    found = scored("lpips", options, images, PROMPTS[:3], target=others)
    torch.testing.assert_close(found[:2], torch.stack(expected), rtol=0, atol=1e-4)
    assert found[2].isnan() and expected[0] < 0.99
    same = [images[0], save_turned(images[1], tmp_path / "turned.png"), images[2]]
    assert scored("lpips", options, images, PROMPTS[:3], target=same).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="at least 32 x 32 pixels"):
        scored("lpips", options, [IMAGES[0].resize((64, 16))], PROMPTS[:1], target=[IMAGES[0]])


@torch.no_grad()
def test_in_float16_large_features_neither_overflow_nor_vanish(tmp_path) -> None:
    weights, linear = lpips_files(tmp_path, "alex")
    name, images = tmp_path / "alexnet-owt-7be5be79.pth", [image.resize((48, 40)) for image in IMAGES[:2]]
    first = {key: 100 * weights[key] for key in ("features.0.weight", "features.0.bias")}  # 64 * 100**2 > 65504
    torch.save({**torch.load(name), **{key: each.float() for key, each in first.items()}}, name)
    weights |= first
    expected = 1 - lpips_distance(*images, "alex", weights, linear).item()
    options = {"model": str(tmp_path), "dtype": "float16", "device": "cpu"}
    found = scored("lpips", options, images[:1], PROMPTS[:1], target=images[1:]).item()
    assert expected < 0.99 and found == pytest.approx(expected, abs=0.02 * (1 - expected))


def test_lpips_downloads_the_official_files_once(tmp_path, monkeypatch) -> None:
    asked = []
    lpips_files(tmp_path, "alex")

    def download(url, path, progress):
        asked.append(url)
        torch.save(torch.load(tmp_path / url.rpartition("/")[2]), path)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with pytest.raises(RuntimeError, match="alexnet-owt-7be5be79.pth.*HF_HUB_OFFLINE"):
        score(load_rewards("lpips"), images=IMAGES[:1], prompts=PROMPTS[:1], columns={"target": IMAGES[:1]})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for _ in range(2):
        assert scored("lpips", {}, IMAGES[:1], PROMPTS[:1], target=IMAGES[:1]).tolist() == [1]
    assert [url.rpartition("/")[2] for url in asked] == ["alexnet-owt-7be5be79.pth", "alex.pth"]

    def unreachable(url, path, progress):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    with pytest.raises(RuntimeError, match="vgg16-397923af.pth.*no route"):
        scored("lpips", {"net": "vgg"}, IMAGES[:1], PROMPTS[:1], target=IMAGES[:1])
