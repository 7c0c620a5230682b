"""What a reward needs is looked for before a model is loaded: packages, folders, the Hub's cache without a network."""

import dataclasses
import functools
import json
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from huggingface_hub import constants
from tiny_runs import trainer_for

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo import cli
from diffusion_grpo.rewards import REWARDS, check_needs, load_rewards, needs, score
from diffusion_grpo.rewards.geneval.detectors import TransformersDetector
from diffusion_grpo.rewards.models.base import ModelReward

OPTIONAL = ("onnxruntime", "rapidocr", "tesserocr", "httpx2", "scipy", "timm", "paddleocr", "paddle")
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
    for module, reader in (("text", "load_recogniser"), ("text", "load_scene_reader"), ("tesseract", "load_reader")):
        module = sys.modules[f"diffusion_grpo.rewards.ocr.{module}"]
        monkeypatch.setattr(module, reader, getattr(module, reader).__wrapped__)  # without what it remembers
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
        assert (
            message.startswith(f"The reward {name!r} cannot score: ") and message.endswith(".") and "\n" not in message
        )
        assert "pip install" in message or "HF_HUB_OFFLINE is set" in message
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
def test_every_file_of_a_folder_is_looked_for(name, bare) -> None:
    options, files = pretended(name, bare)
    assert refusal({name: options}) == "" and files
    for path in files:
        path.unlink()
        message = refusal({name: options})
        assert path.name in message and f"={bare / path.relative_to(bare).parts[0]} is a folder without" in message
        path.touch()


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_folder_that_there_is_not_is_refused_in_every_setting(name, bare) -> None:
    options, _ = pretended(name, bare)
    for setting in options:
        wanted = "no folder /no/such/folder" if setting == "model" else f"{setting}=/no/such/folder is not a folder"
        assert wanted in refusal({name: {**options, setting: "/no/such/folder"}})
        assert f"{setting}=a/b/c is not a folder" in refusal({name: {**options, setting: "a/b/c"}})


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_hub_id_is_looked_for_in_the_cache_and_then_on_the_hub(name, bare, monkeypatch) -> None:
    options, _ = pretended(name, bare / "made")
    sources = REWARDS[name](**PLACES.get(name, {})).sources()
    for source in sources:  # as `hf download` leaves them
        repository = bare / "cache" / f"models--{source.place.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text("abc")
        (repository / "snapshots").mkdir(exist_ok=True)
        (repository / "snapshots" / "abc").symlink_to(bare / "made" / source.setting)
    assert refusal({name: PLACES.get(name, {})}) == ""
    lost = sources[-1].files[0][0]
    (bare / "made" / sources[-1].setting / lost).unlink()
    message = refusal({name: PLACES.get(name, {})})
    assert f"{sources[-1].setting}={sources[-1].place} (revision main)" in message and lost in message
    assert f"the cache {bare / 'cache'}" in message and f"`hf download {sources[-1].place}" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for answer, expected in (
        (lambda *file, **options: True, ""),
        (lambda *file, **options: False, "has no "),
        (fail, "no route"),
    ):
        monkeypatch.setattr("huggingface_hub.file_exists", answer)
        assert expected in refusal({name: PLACES.get(name, {})})
    monkeypatch.setattr("huggingface_hub.file_exists", lambda *file, **options: True)
    assert refusal({name: PLACES.get(name, {})}) == ""


def fail(*file, **options):
    raise OSError("no route to host")


def test_the_official_files_of_lpips_are_looked_for(bare) -> None:
    for filename in ("alexnet-owt-7be5be79.pth", "alex.pth"):
        assert f"{filename}, which is not at {bare}" in refusal("lpips")
        path = bare / "hub" / "checkpoints" / f"lpips-alex-{filename}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert refusal("lpips") == ""


def test_parts_of_weights_and_of_a_vocabulary_are_looked_for(bare) -> None:
    options, _ = pretended("clip_score", bare)
    (bare / "model" / "model.safetensors").unlink()
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (bare / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (bare / "model" / parts["a"]).touch()
    assert f"without {parts['b']}, which belongs to model.safetensors.index.json" in refusal({"clip_score": options})
    (bare / "model" / parts["b"]).touch()
    assert refusal({"clip_score": options}) == ""
    (bare / "model" / "tokenizer.json").rename(bare / "model" / "vocab.json")
    assert "without merges.txt" in refusal({"clip_score": options})
    for content in ("{}", "no JSON"):
        (bare / "model" / "model.safetensors.index.json").write_text(content)
        assert "model.safetensors.index.json is not an index of weights" in refusal({"clip_score": options})


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "spiece.model", "vocab.txt"])
def test_a_vocabulary_has_many_names(name, bare) -> None:
    options, _ = pretended("clip_score", bare)
    (bare / "model" / "tokenizer.json").rename(bare / "model" / name)
    assert refusal({"clip_score": options}) == ""


def test_videoalign_as_its_training_leaves_it_needs_the_base_too(bare) -> None:
    options, _ = pretended("videoalign", bare)
    folder = bare / "model" / "checkpoint-11352"
    (folder / "adapter_model.safetensors").touch()
    assert "checkpoint-11352/non_lora_state_dict.pth" in refusal({"videoalign": options})
    (folder / "non_lora_state_dict.pth").touch()
    assert f"base={bare / 'base'} is a folder without model.safetensors" in refusal({"videoalign": options})
    (bare / "base" / "model.safetensors").touch()
    assert refusal({"videoalign": options}) == ""


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
    assert f"detector={folder} is a folder without preproc" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "timm", tf.DetrConfig())
    assert "timm is not installed; install it with `pip install" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "mask2former", tf.Mask2FormerConfig())
    assert "scipy is not installed" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "owlv2", tf.Owlv2Config())
    assert "without tokenizer.json or vocab.json" in refusal({"geneval": {"detector": str(folder)}})
    folder = detector(bare / "bert", tf.BertConfig())
    assert "is a bert, which is not a supported detector" in refusal({"geneval": {"detector": str(folder)}})


def test_readers_of_text_are_tried(bare) -> None:
    assert 'pip install "diffusion-grpo[ocr]"' in refusal({"text": {"scene": True}})
    assert "paddleocr is not installed" in refusal({"text": {"engine": "paddleocr"}})
    assert "engine_kwargs are arguments of PaddleOCR" in refusal({"text": {"engine_kwargs": {"lang": "ch"}}})
    text = functools.partial(REWARDS["text"], engine="paddleocr")
    assert "paddleocr is not installed" in refusal(text)


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


@pytest.mark.parametrize("place", ["rewards", "eval_reward_funcs", "watch_rewards"])
def test_a_trainer_refuses_them_wherever_they_are_named(place, bare) -> None:
    rewards = {place: ["aesthetic"] if place == "watch_rewards" else "aesthetic"}
    with pytest.raises(ValueError, match="The reward 'aesthetic' cannot score: HF_HUB_OFFLINE is set"):
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
    assert "The reward 'aesthetic' cannot score: HF_HUB_OFFLINE is set" in message and len(message.splitlines()) == 1


def test_no_model_reward_is_without_sources() -> None:
    """`ModelReward` asks for them, so that a new one cannot be made without."""

    @dataclasses.dataclass(eq=False)
    class Forgetful(ModelReward):
        def load(self): ...

    with pytest.raises(TypeError, match="abstract method '?sources"):
        Forgetful("owner/name")
    assert TransformersDetector("owner/name").sources()[0].place == "owner/name"
