"""The reward `videoalign`: VideoAlign's VideoReward, which scores how well videos look, move and fit the prompt.

Qwen2-VL 2B with a LoRA reads two frames per second, an instruction and the prompt. A linear head at the tokens
<|VQ_reward|>, <|MQ_reward|> and <|TA_reward|> gives visual quality, motion quality and text alignment, which are then
normalised with constants from the checkpoint. https://huggingface.co/papers/2501.13918
"""

import dataclasses
import hashlib
import json
import threading
import weakref
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from .base import Source, weights_path
from .qwen_vl import QwenReward, RewardNetwork, as_frame, check_prompts, fit_size

DIMENSIONS = ("VQ", "MQ", "TA")
MIN_PIXELS = 128 * 28 * 28  # per frame; the checkpoint sets the maximum
MIN_FRAMES, MAX_FRAMES = 4, 768
_loaded: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


@dataclasses.dataclass(eq=False)
class VideoAlign(QwenReward):
    """One dimension of VideoAlign's reward, normalised as the checkpoint sets it."""

    model: str = "KwaiVGI/VideoReward"
    batch_size: int = 2
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    checkpoint: str = "checkpoint-11352"
    dimension: Literal["VQ", "MQ", "TA", "Overall"] = "Overall"

    marks = [f"<|{dimension}_reward|>" for dimension in DIMENSIONS]

    def __post_init__(self):
        super().__post_init__()
        # rewards that differ only in their dimension share one model and one pass over each video
        key = tuple(value for name, value in self.settings().items() if name != "dimension")
        self._scorer = _loaded.setdefault(key, self)
        self._known: dict[bytes, list[float]] = {}  # of the last call
        self._one_at_a_time = threading.Lock()

    def __call__(self, videos: list[list[Image.Image]], prompts: list[str], fps: float) -> list[float]:
        """Return one score per video of `fps` frames per second."""
        scores = self._scorer.all_dimensions(videos, prompts, fps)
        if self.dimension == "Overall":
            return [sum(dimensions) for dimensions in scores]
        return [dimensions[DIMENSIONS.index(self.dimension)] for dimensions in scores]

    def all_dimensions(self, videos: list[list[Image.Image]], prompts: list[str], fps: float) -> list[list[float]]:
        """Return VQ, MQ and TA of each video; reuse the last call's scores of the same frames and prompt."""
        with self._one_at_a_time:
            settings = self._settings()
            chosen = [[video[place] for place in choose_frames(len(video), fps, settings)] for video in videos]
            keys = [_key(video, prompt) for video, prompt in zip(chosen, check_prompts(prompts), strict=True)]
            new = {key: row for row, key in enumerate(keys) if key not in self._known}
            rows = list(new.values())
            scores = self.in_batches(self._score, [chosen[row] for row in rows], [prompts[row] for row in rows])
            known = self._known | dict(zip(new, scores, strict=True))
            self._known = {key: known[key] for key in keys}
        return [known[key] for key in keys]

    def sources(self) -> list[Source]:
        return self.find_sources("model_config.json", f"{self.checkpoint}/model.pth")

    def load(self) -> RewardNetwork:
        """Load the network, without merging the LoRA."""

        def prepare(backbone: nn.Module, weights: dict[str, Tensor]) -> None:
            if any(".lora_A." in name for name in weights):
                _add_lora(backbone, weights, self._settings()["peft_lora_config"])

        def make_head(weights: dict[str, Tensor], width: int) -> nn.Module:
            # 3 outputs, or 1 whose meaning depends on the token
            return nn.Linear(width, len(weights.get("weight", DIMENSIONS)), bias=False)

        return self.load_checkpoint(f"{self.checkpoint}/model.pth", make_head, prepare)

    def _settings(self) -> dict[str, Any]:
        if not hasattr(self, "_read"):
            path = weights_path(self.model, "model_config.json", self.revision)
            self._read = _check_settings(json.loads(path.read_text(encoding="utf-8")), path)
        return self._read

    def _score(self, network: RewardNetwork, videos: list, prompts: list[str]) -> list[list[float]]:
        """Return normalised VQ, MQ and TA; of three outputs per token, read the first at the first token, etc."""
        settings = self._settings()
        frames = [_resize(video, settings["data_config"]["max_frame_pixels"]) for video in videos]
        outputs = self.run(network, "videoalign", prompts, frames, "video")
        logits = outputs.diagonal(dim1=1, dim2=2) if outputs.shape[2] == len(DIMENSIONS) else outputs[:, :, 0]
        scale = settings["inference_config"]
        return [
            [(value - scale[f"{name}_mean"]) / scale[f"{name}_std"] for name, value in zip(DIMENSIONS, row)]
            for row in logits.tolist()
        ]


def _check_settings(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the checkpoint's settings, checked and with a neutral normalisation if they have none."""
    expected = {
        ("data_config", "prompt_template_type"): "detailed_special",
        ("data_config", "sample_type"): "uniform",
        ("model_config", "use_special_tokens"): True,
    }
    for (part, name), value in expected.items():
        setting = settings.get(part, {}).get(name, value)
        if setting != value:
            raise ValueError(f"{path} has {name}={setting!r}; videoalign reads checkpoints with {value!r}.")
    neutral = {f"{name}_{moment}": float(moment == "std") for name in DIMENSIONS for moment in ("mean", "std")}
    return {**settings, "inference_config": settings.get("inference_config") or neutral}


def choose_frames(length: int, fps: float, settings: dict[str, Any]) -> list[int]:
    """Choose the frames to read: an even number, evenly spaced, as many as the checkpoint's rate asks for."""
    if length < 2:
        raise ValueError("videoalign scores motion, but a video has one frame only.")
    data = settings["data_config"]
    if data.get("num_frames") is not None:
        count = round(data["num_frames"] / 2) * 2
    else:
        wanted = min(max(length / fps * data["fps"], MIN_FRAMES), min(MAX_FRAMES, length) // 2 * 2)
        count = round(wanted / 2) * 2
    return torch.linspace(0, length - 1, min(count, length)).round().long().tolist()


def _resize(video: list[Image.Image], max_pixels: int) -> Tensor:
    """Resize as torchvision does (bicubic, antialiased, rounded), to `(frames, 3, height, width)`."""
    frames = torch.stack([as_frame(image) for image in video]).float()
    width, height = fit_size(*video[0].size, min_pixels=MIN_PIXELS, max_pixels=max_pixels)
    resized = nn.functional.interpolate(frames, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round()


def _key(video: list[Image.Image], prompt: str) -> bytes:
    """Return a hash of a video's pixels and its prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=16)
    for image in video:
        digest.update(repr((image.mode, image.size)).encode())
        digest.update(image.tobytes())
    return digest.digest()


def _add_lora(backbone: nn.Module, weights: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Add adapters to the layers that have them in `weights`."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, inject_adapter_in_model

    lora_weights = {name.split(".lora_A.")[0]: value for name, value in weights.items() if ".lora_A." in name}
    config = LoraConfig(
        r=len(next(iter(lora_weights.values()))),
        lora_alpha=settings["lora_alpha"],
        use_rslora=settings.get("use_rslora", False),
        target_modules=sorted(lora_weights),
    )
    with init_empty_weights(include_buffers=False):
        inject_adapter_in_model(config, backbone)
