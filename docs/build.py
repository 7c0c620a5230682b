"""
Write docs/config.md from the settings' help texts and check every relative link in the docs: `make docs`.

With `--check` nothing is written; it fails if docs/config.md differs from what the settings say, as the tests do.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from diffusion_grpo.config.arguments import LaunchArguments, LoraArguments, ScriptArguments
from diffusion_grpo.config.settings import DiffusionGRPOConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = ROOT / "docs" / "config.md"

HEAD = """# Settings

<!-- Written by `make docs` from the help texts in the code; changes belong there. -->

The fields of `DiffusionGRPOConfig` describe a run. The command `diffusion-grpo train` reads them, together with the
settings of the command line and of LoRA, from one YAML file and from flags (`--key value`; flags win, and `null` is
YAML's). Names are TRL's where TRL has one. Settings that contradict each other are refused before a model is loaded.
"""

TAIL = """## From transformers

Every other field of `transformers.TrainingArguments` is available too, and its documentation applies. These are used
most with a diffusion model:

* length: `max_steps`, `num_train_epochs`; `warmup_steps`, `lr_scheduler_kwargs`
* optimizer: `optim`, `adam_beta1`, `adam_beta2`, `adam_epsilon`, `max_grad_norm`
* evaluation: `eval_strategy`, `eval_steps`, `eval_on_start` (also measures the untrained model),
  `per_device_eval_batch_size`
* checkpoints: `save_strategy`, `save_total_limit`, `load_best_model_at_end`, `metric_for_best_model` (such as
  `eval_reward`), `resume_from_checkpoint` (`true` takes the newest complete one)
* output: `output_dir`, `report_to`, `run_name`, `push_to_hub`, `hub_model_id`
* speed and memory: `gradient_checkpointing`, `torch_compile`, `fp16`
* randomness: `seed`, `data_seed` (the order of the prompts)

Fields about tokens and labels have no effect. `diffusion-grpo train --list-settings` prints every field with
its default and help text.
"""


def format_config_page() -> str:
    """Return the text of docs/config.md."""
    parts = [HEAD, "## The run (command line only)\n", format_table(dataclasses.fields(ScriptArguments))]
    parts += ["## LoRA (command line only)\n", format_table(dataclasses.fields(LoraArguments))]
    parts += ["From Python, pass a `peft.LoraConfig` to the trainer as `peft_config` instead.\n"]
    parts += ["## Processes (command line only)\n", format_table(dataclasses.fields(LaunchArguments))]
    settings = {setting.name: setting for setting in dataclasses.fields(DiffusionGRPOConfig)}
    for title, names in group_fields(DiffusionGRPOConfig):
        parts += [f"## {title}\n", format_table([settings[name] for name in names])]
    parts.append(TAIL)
    return "\n".join(parts)


def group_fields(settings: type) -> Iterator[tuple[str, list[str]]]:
    """Yield headings and their fields in source order, first those whose default differs from transformers'."""
    ours = [base for base in settings.__mro__ if base.__module__.startswith("diffusion_grpo.")]
    for source in [ours[0], *reversed(ours[1:])]:
        title, names = "", []
        for line in inspect.getsource(source).splitlines():
            if heading := re.fullmatch(r"    # (.+)", line):
                if names:
                    yield title, names
                title, names = heading[1], []
            elif (name := re.match(r"    (\w+): ", line)) and title:
                names.append(name[1])
            elif line.startswith("    def "):
                break
        yield title, names


def format_table(settings: list[dataclasses.Field]) -> str:
    """Return a Markdown table of dataclass fields."""
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    for setting in settings:
        has_factory = setting.default_factory is not dataclasses.MISSING
        default = setting.default_factory() if has_factory else setting.default
        default = "required" if default is dataclasses.MISSING else f"`{default}`"
        text = " ".join(setting.metadata["help"].split()).replace("|", "\\|")
        lines.append(f"| `{setting.name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def find_broken_links(pages: list[Path]) -> list[str]:
    """Return relative links to files or headings that do not exist, as `page: target`."""
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://")):
                continue
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            if not path.exists() or (anchor and anchor not in find_anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    return broken


def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main() -> int:
    if "--check" not in sys.argv:
        CONFIG.write_text(format_config_page(), encoding="utf-8")
        print(f"wrote {CONFIG.relative_to(ROOT)}")
    elif CONFIG.read_text(encoding="utf-8") != format_config_page():
        print("docs/config.md differs from what the settings say; run make docs")
        return 1
    broken = find_broken_links(PAGES)
    for link in broken:
        print(f"broken link in {link}")
    print(f"checked the links of {len(PAGES)} pages")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
