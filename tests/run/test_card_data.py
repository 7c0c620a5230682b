"""The header of a model card, and which files of a run are published."""

import diffusers
import pytest
from huggingface_hub.utils import filter_repo_objects

from diffusion_grpo.rewards.loading import load_rewards
from diffusion_grpo.run.card_data import find_license, list_upload_patterns, name_repository, pipeline_tag
from diffusion_grpo.weights.public_names import strip_secrets

FILES = [
    "README.md",
    "curve.png",
    "grid.png",
    "images/0-before.mp4",
    "images/0-after.png",
    "images/0-input.png",
    "train.yaml",
    "run.json",
    "adapter_config.json",
    "pytorch_lora_weights.safetensors",
    "policy/adapter_model.safetensors",
    "model_index.json",
    "transformer/config.json",
    "tokenizer/vocab.json",
    "scheduler/scheduler_config.json",
]
PRIVATE = [
    "report.html",
    "trainer_state.json",
    "samples/step-000000/0000.png",
    "samples/step-000000.parquet",
    "evaluations/step-000000/0000.png",
    "runs/Nov01_my-host/events.out.tfevents.1.my-host.2.0",
    "prompts.txt",
    "images/photo.png",
]
NEVER = ["checkpoint-2/pytorch_lora_weights.safetensors", "tmp-checkpoint-3/config.json"]
NEVER += ["abandoned/after-2/checkpoint-3/pytorch_lora_weights.safetensors"]
NEVER += ["policy/pytorch_lora_weights.safetensors", "policy/transformer_2/pytorch_lora_weights.safetensors"]


@pytest.mark.parametrize("push_samples", [False, True])
def test_what_is_published(push_samples):
    patterns = list_upload_patterns(["transformer", "tokenizer", "scheduler"], push_samples)
    pushed = set(filter_repo_objects([*FILES, *PRIVATE, *NEVER], **patterns))
    assert pushed == {*FILES, *(PRIVATE if push_samples else [])}


@pytest.mark.parametrize(
    ("pipeline", "given", "tag"),
    [
        ("StableDiffusion3Pipeline", ["prompt"], "text-to-image"),
        ("FluxKontextPipeline", ["prompt", "image"], "image-to-image"),
        ("WanPipeline", ["prompt"], "text-to-video"),
        ("WanImageToVideoPipeline", ["prompt", "image"], "image-to-video"),
        ("WanVideoToVideoPipeline", ["prompt", "video"], "video-to-video"),
        ("WanVACEPipeline", ["prompt"], "text-to-video"),
        ("StableAudioPipeline", ["prompt"], "text-to-audio"),
        ("DDPMPipeline", [], "unconditional-image-generation"),
        ("KandinskyPriorPipeline", ["prompt"], None),
    ],
)
def test_the_pipeline_tag(pipeline, given, tag):
    assert pipeline_tag(getattr(diffusers, pipeline), given) == tag


def test_the_licence_of_the_base_model(tmp_path, caplog):
    assert find_license("tiny") == {"license": "apache-2.0"} and find_license("someone/unknown") == {}
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: theirs\ntags: [a]\n---\nText\n")
    assert find_license(str(tmp_path)) == {"license": "other", "license_name": "theirs"}
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert find_license(str(tmp_path)) == {} and "cannot be read" in caplog.text


def test_a_repository_without_its_namespace_is_no_place_to_load_from():
    assert name_repository(None, None) is None and name_repository(None, "mine") is None
    assert name_repository(None, "me/mine") == name_repository("me/mine", "mine") == "me/mine"


def test_no_value_of_a_urls_query_is_published():
    assert strip_secrets({"url": "https://h/v1?key=abc&token=z/z"}) == {"url": "https://h/v1?key=...&token=..."}
    assert strip_secrets("http://a:b@h?x=1#part=2 and wss://h/?y=2") == "http://h?x=...#part=... and wss://h/?y=..."
    for text in ("http://h/v1?", "http://h/a=b", "is it a?b=c", "https://h/?flag"):
        assert strip_secrets(text) == text


def test_no_password_of_a_url_is_published():
    given = {"url": ["http://me:pass@host:8000/v1", "https://me@host"], "extra": {"Authorization": "Bearer 1", "n": 1}}
    assert strip_secrets(given) == {"url": ["http://host:8000/v1", "https://host"], "extra": {"n": 1}}
    assert strip_secrets("either ws://a:b@c or http://p@ss:w@rd@host?a") == "either ws://c or http://host?a"
    for text in ("http://host:8000/v1", "https://host/@someone", "me@mail.example", "cats://a dog @home"):
        assert strip_secrets(text) == text


def test_what_a_reward_is_told_is_recorded_without_secrets():
    request = {"api_key": "sk-1", "seed": 0}
    settings = {"url": "http://h", "model": "m", "template": "{prompt}", "extra": request}
    (reward,) = load_rewards({"vlm_judge": settings})
    recorded = strip_secrets(reward.options())
    assert recorded["extra"] == {"seed": 0} and "sk-1" not in str(recorded)
