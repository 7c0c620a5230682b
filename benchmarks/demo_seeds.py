"""
Run the demo with several seeds: `python benchmarks/demo_seeds.py` writes a table to docs/demo_runs.md, and a picture
of the first to docs/images/demo.png.

One lucky seed proves nothing. Each run is `make demo` with another seed; a finished run is not repeated.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from diffusion_grpo import tiny
from diffusion_grpo.report.run_folder import Run, read_run
from diffusion_grpo.training.trackers import TITLE_HEIGHT

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs" / "demo_runs.md", ROOT / "docs" / "images" / "demo.png"
LABEL, CELL = 64, (100, 36)  # pixels of the grid's labels, and of a word with its margin

HEAD = """# The demo in {count} seeds

Run `make demo` to train the embedded model on a CPU. What it gains on {prompts} held-out prompts, by the plain
deterministic sampler with {steps} steps, at guidance 1 unless stated otherwise: each cell is a mean with its standard
error. Tesseract is never trained on. Written by `{command}` on {machine}.
"""


def table(runs: dict[int, Run]) -> list[str]:
    """Return Markdown: per seed the untrained model, also with guidance, and the trained one; then what was gained."""
    names = ["reward", *next(iter(runs.values())).reward_names]
    lines = ["| seed | | " + " | ".join(names) + " | updates | minutes |", "|---|---|" + "---|" * (len(names) + 2)]
    for seed, run in runs.items():
        lines.append(row(seed, "untrained", [run.held_out(name, 0) for name in names], ["", ""]))
        for line in run.baseline_cells("reward"):
            lines.append(row(seed, f"untrained, {line}", [run.baseline_cells(name)[line] for name in names], ["", ""]))
        ends = [str(run.updates), f"{run.seconds / 60:.1f}"]
        lines.append(row(seed, "**trained**", [run.held_out(name, -1) for name in names], ends))
    lines += ["", "The share of the missing reward (the distance to its maximum) that was gained:", ""]
    lines += ["| seed | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for seed, run in runs.items():
        shares = [measure_gain(run, name) for name in names]
        lines.append(f"| {seed} | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |")
    return lines


def measure_gain(run: Run, name: str) -> float:
    """Return the gain of a reward that ends at 1, as a share of what was missing."""
    (before, _), (after, _) = run.held_out(name, 0), run.held_out(name, -1)
    return (after - before) / (1 - before)


def row(seed: int, name: str, cells: list[tuple[float | None, float | None]], ends: list[str]) -> str:
    """Return one line of the table."""
    texts = ["–" if mean is None else f"{mean:.3f} ± {error:.3f}" for mean, error in cells]
    return f"| {seed} | {name} | " + " | ".join([*texts, *ends]) + " |"


def machine() -> str:
    """Describe the machine that made the runs; the family tells processors with one name apart."""
    path = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in path.read_text().splitlines()] if path.is_file() else []
    found = {key.strip(): value.strip() for key, _, value in lines}
    name, family = found.get("model name", platform.machine()), found.get("cpu family")
    return f"{os.cpu_count()} CPU cores ({name}{f', family {family}' if family else ''})"


def save_picture(folder: Path, words: int = 10) -> None:
    """Draw the first words of a run before and after under their prompts, above its curve."""
    with Image.open(folder / "grid.png") as grid, Image.open(folder / "curve.png") as curve:
        width, last = LABEL + words * CELL[0], grid.height - CELL[1]
        rows = [grid.crop((0, top, width, top + CELL[1])) for top in (TITLE_HEIGHT, last)]
        picture = Image.new("RGB", (width, 3 * CELL[1] + 8 + curve.height), "white")
        picture.paste(draw_prompts(tiny.prompts("test", n=words)["prompt"]))
        for number, row in enumerate(rows, start=1):
            picture.paste(row, (0, number * CELL[1]))
        picture.paste(curve, ((width - curve.width) // 2, 3 * CELL[1] + 8))
    picture.save(PICTURE)


def draw_prompts(prompts: list[str]) -> Image.Image:
    """Draw what each column of a grid was asked for, such as *FOG in purple*."""
    row = Image.new("RGB", (LABEL + len(prompts) * CELL[0], CELL[1]), "white")
    draw, font = ImageDraw.Draw(row), ImageFont.load_default(13)
    for number, prompt in enumerate(["asked for", *(p.removeprefix("the word ").replace('"', "") for p in prompts)]):
        middle = LABEL / 2 if number == 0 else LABEL + (number - 0.5) * CELL[0]
        lines = prompt.replace(" in ", "\nin ").replace(" for", "\nfor")
        draw.multiline_text((middle, CELL[1] / 2), lines, "#24292f", font, "mm", align="center", spacing=2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--note", default="", help="a sentence about how these runs were made")
    arguments = parser.parse_args()
    runs = {}
    for seed in arguments.seeds:
        folder = f"outputs/demo-seed-{seed}"
        if not (ROOT / folder / "summary.json").is_file():
            words = ["train", "examples/demo.yaml", "--seed", str(seed), "--output_dir", folder]
            subprocess.run([sys.executable, "-m", "diffusion_grpo.cli", *words], check=True, cwd=ROOT)
        runs[seed] = read_run(ROOT / folder)
    first = next(iter(runs.values()))
    settings = first.info["settings"]
    head = HEAD.format(
        count=len(runs),
        command="python benchmarks/demo_seeds.py",
        machine=machine(),
        prompts=first.info["prompts"]["eval"],
        steps=settings.get("eval_num_inference_steps") or settings["num_inference_steps"],
    )
    head += f"\n{arguments.note}\n" if arguments.note else ""
    save_picture(ROOT / f"outputs/demo-seed-{arguments.seeds[0]}")
    PAGE.write_text("\n".join([head, *table(runs)]) + "\n", encoding="utf-8")
    print(
        json.dumps({seed: measure_gain(run, "reward") for seed, run in runs.items()}), f"-> {PAGE.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
