"""What a user may write as `reward_funcs`, and what is refused before a model is loaded."""

import functools
import math
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from huggingface_hub import constants
from own_rewards import scaled
from plain_images import FOUR, FOUR_PROMPTS
from tiny_runs import trainer_for

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo import cli
from diffusion_grpo.rewards import (
    REWARDS,
    Reward,
    check_needs,
    get_reward,
    load_rewards,
    needs,
    ocr,
    reward_weights,
    score,
)
from diffusion_grpo.rewards.models.base import ModelReward


@pytest.mark.parametrize(
    "written",
    [
        {"brightness": 0.6, scaled: {"factor": 2.0, "weight": 0.4}},
        [{"brightness": 0.6}, {scaled: {"factor": 2.0, "weight": 0.4}}],
        [{"brightness": {"weight": 0.6}, "own_rewards.scaled": {"factor": 2, "weight": 0.4}}],
    ],
    ids=["mapping", "list", "dotted"],
)
def test_forms_of_the_same_two_rewards(written) -> None:
    rewards = load_rewards(written)
    assert [reward.name for reward in rewards] == ["brightness", "scaled"]
    assert reward_weights(rewards, None) == [0.6, 0.4]
    table = score(rewards, images=FOUR, prompts=FOUR_PROMPTS)
    torch.testing.assert_close(table, torch.tensor([[0, 0], [0.2, 0.4], [0.4, 0.8], [1, 2.0]]))


def test_plain_forms() -> None:
    assert load_rewards(None) == [] and load_rewards([]) == []
    assert load_rewards("brightness")[0].function is REWARDS["brightness"]
    assert [reward.name for reward in load_rewards(["brightness", scaled])] == ["brightness", "scaled"]
    assert load_rewards({"brightness": None})[0].weight is None
    reward = Reward(scaled, "mine", {"factor": 2.0})
    assert load_rewards([reward]) == [reward]


def test_a_class_is_made_with_its_arguments() -> None:
    (reward,) = load_rewards({"own_rewards.Scorer": {"model": "some/model", "size": 5, "weight": 2}})
    assert (reward.name, reward.weight, reward.function.model) == ("Scorer", 2, "some/model")
    assert reward.options() == {"model": "some/model", "size": 5}
    assert score([reward], images=FOUR, prompts=FOUR_PROMPTS).tolist() == [[5.0]] * 4


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"brightness": {"wieght": 1}}, "no argument 'wieght'.*Did you mean 'weight'"),
        ({"ssim": {"target_colum": "x"}}, "no argument 'target_colum'; it has target_column, name, weight"),
        ({"remote": {"url": "http://a", "columns": "word"}}, "columns='word'; expected list"),
        ({"brigthness": 1}, "Did you mean 'brightness'"),
        ([["brightness", 1]], "in a list"),
        (["brightness", "brightness"], "two rewards called 'brightness'"),
        ({"brightness": {"name": "reward"}}, "'reward' is a column of every table of samples"),
        ({"brightness": {"name": "a/b"}}, "'a/b' is used in file names"),
        ({"brightness": {"clip": [1, 0]}}, "clip="),
        ({"brightness": {"frames": 0}}, "frames="),
        ({"motion": {"frames": 1}}, "has frames=1, but gets whole videos"),
        ({"own_rewards.Scorer": {"size": 3}}, "missing a required argument: 'model'"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0][:60],
)
def test_what_is_wrong_is_refused(written, message) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        load_rewards(written)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("zzz", "use one of text, .*color, tesseract, brightness, jpeg_compressibility"),
        ("no_such_package.reward", "no_such_package"),
        ("math.pi", "cannot be called"),
    ],
)
def test_get_reward_refuses_what_it_does_not_know(wrong: str, message: str) -> None:
    assert get_reward("math.sqrt") is math.sqrt
    with pytest.raises(ValueError, match=message):
        get_reward(wrong)


def test_the_pages_have_every_reward_and_its_weights() -> None:
    page = "".join(path.read_text() for path in (Path(__file__).parents[2] / "docs" / "rewards").glob("*.md"))
    for name, reward in REWARDS.items():
        assert f"`{name}`" in page or f"- {name}:" in page, name
        if isinstance(reward, type) and issubclass(reward, ModelReward):
            assert f"`{reward.model}`" in page or reward.model == "official", name


OPTIONAL = ("onnxruntime", "rapidfuzz", "rapidocr", "tesserocr", "skimage", "httpx2", "scipy", "timm")
OPTIONAL += ("paddleocr", "paddle")
REQUIRED = {
    "geneval": {"detector": "owner/detector"},
    "remote": {"url": "http://127.0.0.1:1"},
    "vlm_judge": {"url": "http://127.0.0.1:1/v1", "model": "judge", "template": "{prompt}?"},
    "unified_reward": {"url": "http://127.0.0.1:1/v1"},
}
WITH_WEIGHTS = [
    name for name, reward in REWARDS.items() if isinstance(reward, type) and issubclass(reward, ModelReward)
]
IMAGE = draw_word("WORD", "red", random.Random(0))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with the core packages alone, an empty cache and no network."""
    for package in OPTIONAL:
        monkeypatch.setitem(sys.modules, package, None)
    for reader in ("load_recogniser", "load_scene_reader", "load_tesseract"):  # without what it remembers
        monkeypatch.setattr(ocr, reader, getattr(ocr, reader).__wrapped__)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path


def refusal(rewards) -> str:
    """The sentence by which they are refused, or ""."""
    try:
        check_needs(load_rewards(rewards))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_scores_on_a_bare_machine_or_says_at_the_start_why_not(name, bare) -> None:
    message = refusal({name: REQUIRED.get(name, {})})
    if message:
        assert message.startswith(f"The reward {name!r} cannot score: ") and "\n" not in message
        assert "pip install" in message or "HF_HUB_OFFLINE" in message
    else:
        assert name not in WITH_WEIGHTS
        kinds = {"videos": [[IMAGE] * 4]} if name in ("flicker", "smoothness", "motion") else {"images": [IMAGE]}
        values = score(load_rewards(name), **kinds, prompts=['"WORD" in red'], columns={"target": [IMAGE]})
        assert values.isfinite().all()


def pretended(name: str, root: Path) -> tuple[dict, list]:
    """Options that name folders with an empty file for each that is read, and where these are."""
    sources, files = REWARDS[name](**PLACES.get(name, {})).sources(), []
    for source in sources:
        for alternatives in source.files:
            path = root / source.setting / alternatives[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            if not any((root / source.setting / name).exists() for name in alternatives):
                path.touch()
                files.append(path)
    return {**PLACES.get(name, {}), **{source.setting: str(root / source.setting) for source in sources}}, files


PLACES = {"lpips": {"model": "owner/lpips"}}  # the official files are not of the Hub


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_file_of_a_folder_is_looked_for(name, bare, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "rapidfuzz")  # text_by_model needs it besides its files
    options, files = pretended(name, bare)
    assert refusal({name: options}) == "" and files
    for setting in options:
        assert "/no/such/folder" in refusal({name: {**options, setting: "/no/such/folder"}})
    for path in files:
        path.unlink()
        message = refusal({name: options})
        assert path.name in message and f"={bare / path.relative_to(bare).parts[0]} has no" in message
        path.touch()


@pytest.mark.parametrize("name", ["clip_score", "videoalign"])
def test_a_hub_id_is_looked_for_in_the_cache_and_then_on_the_hub(name, bare, monkeypatch) -> None:
    pretended(name, bare / "made")
    sources = REWARDS[name]().sources()
    for source in sources:  # as `hf download` leaves them
        repository = bare / "cache" / f"models--{source.place.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text("abc")
        (repository / "snapshots").mkdir(exist_ok=True)
        (repository / "snapshots" / "abc").symlink_to(bare / "made" / source.setting)
    assert refusal(name) == ""
    lost = sources[-1].files[0][0]
    (bare / "made" / sources[-1].setting / lost).unlink()
    message = refusal(name)
    assert sources[-1].place in message and lost in message and "HF_HUB_OFFLINE" in message
    for answer, expected in (
        (lambda *file, **options: True, ""),
        (lambda *file, **options: False, f"{lost} on the Hub"),
        (fail, "no route"),
    ):
        monkeypatch.setattr("diffusion_grpo.rewards.models.base.file_exists", answer)
        assert expected in refusal(name) and bool(expected) == bool(refusal(name))


def fail(*file, **options):
    raise Exception("no route to host")


def test_the_official_files_of_lpips_are_looked_for(bare) -> None:
    for filename in ("alexnet-owt-7be5be79.pth", "alex.pth"):
        assert filename in refusal("lpips") and str(bare) in refusal("lpips")
        path = bare / "hub" / "checkpoints" / f"lpips-alex-{filename}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert refusal("lpips") == ""


def detector(folder: Path, config) -> Path:
    config.save_pretrained(folder)
    for name in ("model.safetensors", "preprocessor_config.json"):
        (folder / name).touch()
    return folder


def test_geneval_needs_its_detector_its_colors_and_their_packages(bare) -> None:
    plain = {"backbone_config": tf.ResNetConfig(depths=[1], hidden_sizes=[4]), "d_model": 16}
    folder = detector(bare / "detr", tf.DetrConfig(**plain))
    assert refusal({"geneval": {"detector": str(folder)}}) == ""
    assert "no folder /no/such" in refusal({"geneval": {"detector": str(folder), "colors": "/no/such"}})
    (folder / "preprocessor_config.json").unlink()
    assert f"detector={folder} has no preproc" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "timm", tf.DetrConfig())
    assert "timm is not installed; install it with `pip install" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "mask2former", tf.Mask2FormerConfig())
    assert "scipy is not installed" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "owlv2", tf.Owlv2Config())
    assert "has no tokenizer.json or vocab.json" in refusal({"geneval": {"detector": str(folder)}})


def test_readers_of_text_are_tried(bare) -> None:
    assert 'pip install "diffusion-grpo[ocr]"' in refusal({"text": {"scene": True}})
    assert "paddleocr is not installed" in refusal({"text": {"engine": "paddleocr"}})
    assert "engine_kwargs are arguments of PaddleOCR" in refusal({"text": {"engine_kwargs": {"lang": "ch"}}})
    text = functools.partial(REWARDS["text"], engine="paddleocr")
    assert "paddleocr is not installed" in refusal(text)


@pytest.mark.parametrize(
    ("name", "package"),
    [("ssim", "skimage"), ("psnr", "skimage")]
    + [(name, "rapidfuzz") for name in ("text", "tesseract", "text_by_model")],
)
def test_a_reward_needs_the_library_of_its_metric(name, package, monkeypatch, tmp_path) -> None:
    options = pretended(name, tmp_path)[0] if name in WITH_WEIGHTS else {}
    assert refusal({name: options}) == ""
    monkeypatch.setitem(sys.modules, package, None)
    assert f"{package} is not installed" in refusal({name: options})


def test_a_function_or_object_of_the_user_says_what_it_needs(tmp_path) -> None:
    def look(path=str(tmp_path / "a"), **others):
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no {path}.")

    @needs(look)
    def own(images, path=str(tmp_path / "a"), scale=1.0):
        return [scale] * len(images)

    class Object:
        def __call__(self, images):
            return [1.0] * len(images)

        def check_needs(self):
            raise ImportError("it wants a package.")

    assert refusal({own: {"scale": 2.0}}) == f"The reward 'own' cannot score: there is no {tmp_path / 'a'}."
    assert refusal({own: {"path": str(tmp_path)}}) == refusal(functools.partial(own, path=str(tmp_path))) == ""
    assert refusal(Object()) == "The reward 'Object' cannot score: it wants a package."


@pytest.mark.parametrize("place", ["rewards", "watch_rewards"])
def test_a_trainer_refuses_them_wherever_they_are_named(place, bare) -> None:
    rewards = {place: ["aesthetic"] if place == "watch_rewards" else "aesthetic"}
    with pytest.raises(ValueError, match="'aesthetic' cannot score"):
        trainer_for(bare / "run", **rewards)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--model", "tiny", "--dataset", "tiny", "--reward_funcs", "aesthetic", "--use_cpu", "true"],
        ["sample", "tiny", "--prompts", "tiny", "--reward_funcs", "aesthetic"],
        ["rewards", "serve", "aesthetic", "--port", "0"],
    ],
    ids=lambda words: words[0],
)
def test_commands_refuse_them_before_a_model_is_loaded(words, bare, monkeypatch, capsys) -> None:
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", fail)
    folder = [] if words[0] == "rewards" else ["--output_dir", str(bare / "run")]
    assert cli.main([*words, *folder]) == 2
    message = capsys.readouterr().err
    assert "'aesthetic' cannot score" in message and len(message.splitlines()) == 1
