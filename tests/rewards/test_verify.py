"""`rewards list` names all there is; `rewards verify` tells scores that agree with published ones from others."""

import dataclasses
from pathlib import Path

import torch
from PIL import Image
from tiny_scorers import IMAGES, clip

from diffusion_grpo import cli
from diffusion_grpo.rewards import REWARDS, load_rewards, score, verify
from diffusion_grpo.rewards.catalogue import CATALOGUE
from diffusion_grpo.rewards.models.base import ModelReward


def test_the_noise_is_that_of_torchmetrics() -> None:
    """`torch.randint(255, (3, 224, 224), generator=torch.Generator().manual_seed(42))`, rounded to nothing."""
    generator = torch.Generator().manual_seed(42)
    pixels = torch.randint(255, (3, 224, 224), generator=generator)
    image = verify.noise(42)
    assert image.size == (224, 224) and image.getpixel((5, 7)) == tuple(pixels[:, 7, 5].tolist())


def published(monkeypatch, name, **changes):
    monkeypatch.setitem(verify.PUBLISHED, name, dataclasses.replace(verify.PUBLISHED[name], **changes))


def test_the_drawn_images_are_scored_by_the_weights_that_were_compared(tmp_path, monkeypatch, capsys) -> None:
    clip(tmp_path)
    published(monkeypatch, "clip_score", options={"model": str(tmp_path)}, scores=(0.0,), tolerance=100.0)
    assert cli.main(["rewards", "verify", "clip_score"]) == 0  # and needs no weights of another model
    written = capsys.readouterr().out
    assert "Images drawn here, scored by the same weights:" in written
    assert "not the reward's default weights: model: openai/clip-vit-large-patch14 was not comp" in written
    assert cli.main(["rewards", "verify", "clip_score", "--model", str(tmp_path)]) == 0
    assert "not the reward's default weights" not in capsys.readouterr().out


def test_scores_of_images_that_the_user_fetched(tmp_path, monkeypatch, capsys) -> None:
    from tests.rewards.models.test_lpips import lpips_files

    lpips_files(tmp_path, "alex")
    options = f"{{lpips: {{model: {tmp_path}, target_column: other}}}}"
    assert cli.main(["rewards", "verify", options]) == 2  # nothing to compare
    written = capsys.readouterr().out
    assert "dist_dir/I03.bmp" in written and "ref_dir/I19.bmp" in written and "Nothing was compared" in written
    for row, image in enumerate([*IMAGES, IMAGES[0]]):
        image.save(tmp_path / f"a{row}.png")
        image.rotate(90 * row).save(tmp_path / f"b{row}.png")
    images, targets = ([str(tmp_path / f"{kind}{row}.png") for row in range(5)] for kind in "ab")
    reward = load_rewards({"lpips": {"model": str(tmp_path)}})
    columns = {"target": [Image.open(path) for path in targets]}
    expected = 1 - score(reward, images=[*IMAGES, IMAGES[0]], prompts=[""] * 5, columns=columns)[:, 0]
    published(monkeypatch, "lpips", scores=tuple(expected.tolist()))
    assert cli.main(["rewards", "verify", options, "--image", *images, "--target", *targets]) == 0
    assert capsys.readouterr().out.count("agrees") == 5
    assert cli.main(["rewards", "verify", options, "--image", *images, "--target", *targets[::-1]]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert cli.main(["rewards", "verify", options, "--image", images[0], "--target", *targets]) == 2
    assert "published scores of 5 images, but --image names 1" in capsys.readouterr().err


def test_published_scores_are_whole() -> None:
    for name, known in verify.PUBLISHED.items():
        assert name in REWARDS and len(known.scores) == len(known.prompts) and known.source.startswith("https://")
        assert bool(known.render) != (len(known.files) == len(known.scores)) and known.tolerance > 0
        assert not known.targets or len(known.targets) == len(known.files)


def test_the_page_has_every_reward_with_weights_and_what_is_published() -> None:
    page = "".join(path.read_text() for path in (Path(__file__).parents[2] / "docs" / "rewards").glob("*.md"))
    for name in (*CATALOGUE, *verify.PUBLISHED):
        assert f"`{name}`" in page or f"- {name}:" in page, name
    for name, reward in REWARDS.items():
        if name in CATALOGUE and isinstance(reward, type) and issubclass(reward, ModelReward):
            assert f"`{reward.model}`" in page or reward.model == "official", name
