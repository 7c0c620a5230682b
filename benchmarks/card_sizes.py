"""Say in docs/models what fits on cards of 24, 48 and 80 GB, as `diffusion-grpo plan --fit` finds it.

    python -m benchmarks.card_sizes            # all pages; about eight minutes on one CPU core
    python -m benchmarks.card_sizes FLUX.1-dev

Each table is between two comments of a page. The models have their published sizes and no weights
(`real_sizes.py`); the runs are those of the examples with one sample per micro-batch, gradient checkpointing and no
other memory setting.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffusion_grpo.config.parse import read_yaml
from diffusion_grpo.planning.fit import Fit, fit
from diffusion_grpo.planning.plan import Cache

from .real_sizes import write_model

ROOT = Path(__file__).parent.parent
CARDS = (24, 48, 80)  # GiB
REMOVED = (
    *("cache_prompt_embeds", "quantization", "decode_batch_size", "offload_trajectories", "selective_checkpointing"),
    *("use_peft", "ema_decay", "ema_update_interval"),
)
PLAIN = {
    "gradient_checkpointing": True,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "steps_per_generation": 16,
    "beta": 0.0,
}


@dataclass(frozen=True)
class Case:
    """A model on a page.

    Attributes:
        page: of docs/models.
        example: a file of examples, without its ending.
        size: in words.
        settings: over those of the example.
    """

    page: str
    example: str
    size: str
    settings: dict[str, Any]


SQUARE = {"height": 1024, "width": 1024}
CASES = {  # by the name of the model in `real_sizes.py`
    "FLUX.1-dev": Case("flux", "24gb/flux", "1024 px", SQUARE),
    "SD3.5-M": Case("sd3", "24gb/sd35_large", "1024 px", SQUARE),
    "SD3.5-L": Case("sd3", "24gb/sd35_large", "1024 px", SQUARE),
    "SD1.5": Case("stable_diffusion", "sd15", "512 px", {}),
    "SDXL": Case("stable_diffusion", "24gb/sdxl", "1024 px", SQUARE),
    "Qwen-Image": Case("qwen_image", "24gb/qwen_image", "1024 px", SQUARE),
    "Wan2.1-1.3B": Case("wan", "24gb/wan21", "480p, 33 frames", {}),
    "Wan2.2-TI2V-5B": Case("wan", "24gb/wan22_ti2v", "480p, 33 frames", {}),
    "HunyuanVideo": Case("hunyuan_video", "hunyuan_video", "480 px, 53 frames", {"lora_r": 32, "lora_alpha": 64}),
    "GLM-Image": Case("glm_image", "glm_image_dit", "the DiT, 1024 px", {"bf16": True}),
    "Z-Image-Turbo": Case("few_steps", "z_image_turbo", "1024 px", {}),
    "FLUX.2-klein-4B": Case("few_steps", "flux2_klein", "1024 px", {}),
    "SDXL-Turbo": Case("few_steps", "sdxl_turbo", "512 px", {}),
    "FLUX.3-klein": Case("flux3", "flux3", "512 px", {"model_init_kwargs": {}}),
    "MiniMax-H3": Case("minimax_h3", "minimax_h3", "480p, 124 frames", {}),
    "Stable Audio Open 1.0": Case("stable_audio", "stable_audio", "10 s", {}),
}


def fit_case(name: str, is_lora: bool) -> list[Fit]:
    """Find what fits on each card."""
    case = CASES[name]
    cache: Cache = {}
    run = read_yaml(str(ROOT / "examples" / f"{case.example}.yaml")) | PLAIN | case.settings
    settings = {key: value for key, value in run.items() if key not in REMOVED and (is_lora or "lora_" not in key)}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        own = {"model": str(write_model(name, Path(folder) / "model")), "use_peft": is_lora}
        config.write_text(yaml.safe_dump(settings | own))
        return [fit(str(config), [], size * 2**30, cache=cache) for size in CARDS]


def describe(found: Fit) -> str:
    """Say in a cell of a table how a run fits."""
    most = f"{found.after.accelerator / 2**30:.1f} GiB"
    if not found.fits:
        return f"no; at least {most}"
    chosen = [f"`{name}: {str(value).lower()}`" for name, value in found.settings.items() if value]
    return f"{most}: {', '.join(chosen) or 'as it is'}"


def make_table(name: str, lora: list[Fit], full: list[Fit]) -> str:
    """Return the Markdown of a model's table; cards on which the same fits share a row."""
    table = f"| {name}, {CASES[name].size} | LoRA | all weights |\n|---|---|---|\n"
    cells = [f"{describe(one)} | {describe(other)}" for one, other in zip(lora, full, strict=True)]
    for row in dict.fromkeys(cells):
        cards = ", ".join(str(card) for card, cell in zip(CARDS, cells, strict=True) if cell == row)
        table += f"| {cards} GB | {row} |\n"
    return table


def replace_table(text: str, name: str, table: str) -> str:
    """Put a table between its comments in the text of a page.

    Raises:
        ValueError: the page has no such comments.
    """
    pattern = rf"(<!-- sizes: {re.escape(name)} -->\n\n).*?(\n<!-- end -->)"
    changed, count = re.subn(pattern, lambda match: match[1] + table + match[2], text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"There are {count} places for the sizes of {name}; expected one.")
    return changed


def main(names: list[str]) -> None:
    """Write the tables of some models, or of all."""
    for name in names or CASES:
        page = ROOT / "docs" / "models" / f"{CASES[name].page}.md"
        table = make_table(name, fit_case(name, is_lora=True), fit_case(name, is_lora=False))
        page.write_text(replace_table(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")
        print(table, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
