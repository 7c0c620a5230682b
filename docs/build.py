"""
Write docs/config.md and docs/cli.md from the help texts in the code, and check every relative link: `make docs`.

With `--check` nothing is written; it fails if one of the two differs from what the code says, as the tests do.
"""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from diffusion_grpo.cli import build_parser
from diffusion_grpo.config.arguments import LaunchArguments, LoraArguments, ScriptArguments
from diffusion_grpo.config.settings import DiffusionGRPOConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
CONFIG, CLI = ROOT / "docs" / "config.md", ROOT / "docs" / "cli.md"

HEAD = """# Settings

<!-- Written by `make docs` from the help texts in the code; changes belong there. -->

For a first run set `model`, `reward_funcs`, `dataset`, `eval_dataset`, `output_dir`, `use_peft` and `max_steps`; the
rest has defaults that work.

`diffusion-grpo train` reads all settings from a YAML file and from flags (`--key value`, a dictionary as JSON), which
win. In Python, model, rewards, data and LoRA are arguments of the trainer; the settings from *TrainingArguments* on
are fields of `DiffusionGRPOConfig`. Write `null` for `None`. Settings that TRL has too have the same names.
"""

CLI_HEAD = """# Command line

<!-- Written by `make docs` from the parser in the code; changes belong there. -->

`diffusion-grpo COMMAND --help` prints the same text, `diffusion-grpo --version` the version. `diffusion-grpo
--traceback COMMAND ...` shows where in the code an input was refused or a run failed.

| exit code | means |
|---|---|
| 0 | success |
| 1 | `check` or `plan --fit` found that it does not work, or a run ended in an error |
| 2 | an input was refused, where possible before a model is loaded |
| 130 | Ctrl-C |
| 143 | SIGTERM |
"""

TRAIN_KEYS = """
Every [setting](config.md) is a key of the YAML file and a flag, `--key value`; flags win.
"""

TAIL = """## From transformers

Every other field of `transformers.TrainingArguments` is available too, and its documentation applies. These are used
most with a diffusion model:

* length: `max_steps`, `num_train_epochs`; `warmup_steps`, `lr_scheduler_kwargs`
* optimizer: `optim`, `adam_beta1`, `adam_beta2`, `adam_epsilon`, `max_grad_norm`
* evaluation: `eval_strategy`, `eval_steps`, `eval_on_start` (also measures the untrained model)
* checkpoints: `save_strategy`, `save_total_limit`, `load_best_model_at_end`, `metric_for_best_model` (such as
  `eval_reward`), `resume_from_checkpoint` (`true` takes the newest complete one, or begins)
* output: `output_dir`, `report_to`, `run_name`, `push_to_hub`, `hub_model_id`
* speed and memory: `gradient_checkpointing`, `torch_compile`, `fp16`
* randomness: `seed`, `data_seed` (the order of the prompts)

Fields about tokens and labels have no effect. `diffusion-grpo train --list-settings` prints every field with
its default and help text.
"""


def format_config_page() -> str:
    """Return the text of docs/config.md."""
    parts = [HEAD]
    parts += ["## The run (command line only)\n", format_table(dataclasses.fields(ScriptArguments))]
    parts += ["## LoRA (command line only)\n", format_table(dataclasses.fields(LoraArguments))]
    parts += ["From Python, pass a `peft.LoraConfig` to the trainer as `peft_config` instead.\n"]
    parts += ["## Processes (command line only)\n", format_table(dataclasses.fields(LaunchArguments))]
    settings = {setting.name: setting for setting in dataclasses.fields(DiffusionGRPOConfig)}
    for title, names in group_fields(DiffusionGRPOConfig):
        parts += [f"## {title}\n", format_table([settings[name] for name in names])]
    parts.append(TAIL)
    return "\n".join(parts)


def format_cli_page() -> str:
    """Return the text of docs/cli.md."""
    commands, shown = find_commands(build_parser(), "diffusion-grpo"), {}
    return CLI_HEAD + "".join(format_command(name, command, shown) for name, command in commands)


def find_commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that has no commands of its own, with the words that call it."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for word, command in group.choices.items():
            yield from find_commands(command, f"{name} {word}")
    if not groups:
        yield name, parser


def format_command(name: str, command: argparse.ArgumentParser, shown: dict[str, str]) -> str:
    """Return a heading, the purpose of a command, and a table of its options; `shown` has those of earlier ones."""
    options = [action for action in command._actions if not isinstance(action, argparse._HelpAction)]
    lines = [
        "",
        f"## {name}",
        "",
        command.description,
        *(["", "| option | what it does |", "|---|---|"] if options else []),
    ]
    again: dict[str, list[str]] = {}
    for action in options:
        option = " ".join(filter(None, [", ".join(action.option_strings), name_value(action)]))
        text = " ".join(((action.help or "") % vars(action)).split()).replace("|", "\\|")
        line = f"| `{option}` | {link_pages(text)} |"
        if action.option_strings and shown.setdefault(line, name) != name:
            again.setdefault(shown[line], []).append(f"`{action.option_strings[0]}`")
        else:
            lines.append(line)
    lines += [
        f"| {', '.join(names)} | as for [{first}](#{first.replace(' ', '-')}) |" for first, names in again.items()
    ]
    return "\n".join(lines) + "\n" + (TRAIN_KEYS if name.endswith(" train") else "")


def name_value(action: argparse.Action) -> str:
    """Return how help texts name the value of an option: `N`, or `{a,b}` for a choice; nothing for a switch."""
    if action.nargs == 0:
        return ""
    named = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else None)
    return str(named or (action.dest.upper() if action.option_strings else action.dest))


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
        if names:
            yield title, names


def format_table(settings: list[dataclasses.Field]) -> str:
    """Return a Markdown table of dataclass fields."""
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    for setting in settings:
        has_factory = setting.default_factory is not dataclasses.MISSING
        default = setting.default_factory() if has_factory else setting.default
        default = "required" if default is dataclasses.MISSING else f"`{default}`"
        text = " ".join(setting.metadata["help"].split()).replace("|", "\\|")
        lines.append(f"| `{setting.name}` | {default} | {link_pages(text)} |")
    return "\n".join(lines) + "\n"


def link_pages(text: str) -> str:
    """Turn the pages that a help text names, `docs/data.md`, into links."""
    return re.sub(r"docs/([\w/]+)\.md", lambda page: f"[{page[1].split('/')[-1]}]({page[1]}.md)", text)


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
    for path, text in ((CONFIG, format_config_page()), (CLI, format_cli_page())):
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        elif path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} differs from what the code says; run make docs")
            return 1
    broken = find_broken_links(PAGES)
    for link in broken:
        print(f"broken link in {link}")
    print(f"checked the links of {len(PAGES)} pages")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
