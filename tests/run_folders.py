"""Folders of runs, written by hand in the trainer's format: no model is needed."""

import json

import pyarrow
import pyarrow.parquet
from PIL import Image, ImageDraw

REWARDS, EVALUATED = ["text", "color"], "tesseract"


def make_run(
    path,
    updates=20,
    eval_every=10,
    prompts=12,
    start=0.4,
    stop=0.9,
    size=(96, 32),
    baselines=True,
    shared=0,
    evaluated=EVALUATED,
):
    """Write a run whose held-out rewards rise on a straight line from `start` to `stop`."""
    info = {
        "model": "tiny",
        "pipeline": "StableDiffusion3Pipeline",
        "component": "transformer",
        "reward_funcs": REWARDS,
        "eval_reward_funcs": [evaluated],
        "reward_weights": [0.6, 0.4],
        "trains_by": "LoRA rank 16",
        "settings": {"learning_rate": 0.002, "num_inference_steps": 8, "trained_steps": [0, 4]},
        "versions": {"diffusers": "0.42.1"},
        "prompts": {"train": 608, "eval": prompts, "eval_in_train": shared},
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(info))
    history = []
    for step in range(updates + 1):
        level = start + (stop - start) * step / max(updates, 1)
        if step:
            history.append(train_entry(step, level))
        if step % eval_every == 0:
            history.append(eval_entry(step, level, evaluated))
            write_evaluation(path, step, level, prompts, size, evaluated)
    history.append({"step": updates, "train_runtime": 123.0})
    (path / "trainer_state.json").write_text(json.dumps({"global_step": updates, "log_history": history}))
    if baselines:
        cell = {"mean": 0.7, "std_error": 0.03}
        rewards = dict.fromkeys([*REWARDS, evaluated], cell)
        (path / "baselines.json").write_text(json.dumps([{"name": "guidance 2", "rewards": rewards, "reward": cell}]))
    return path


def change_log(path, change):
    """Change each entry of a run's log; those that are emptied are left out."""
    state = json.loads((path / "trainer_state.json").read_text())
    for entry in state["log_history"]:
        change(entry)
    state["log_history"] = [entry for entry in state["log_history"] if entry]
    (path / "trainer_state.json").write_text(json.dumps(state))
    return path


def train_entry(step, level):
    stages = {"time/rollout": 2.0, "time/reward": 1.0, "time/update": 3.0}
    rewards = {f"rewards/{name}/mean": level - 0.05 for name in REWARDS}
    diagnostics = {"ratio/max_error": 0.0, "frac_reward_zero_std": 0.1, "loss": 0.01, "samples_per_second": 40.0}
    return {"step": step, "reward": level - 0.05, "reward_std": 0.2, **rewards, **stages, **diagnostics}


def eval_entry(step, level, evaluated=EVALUATED):
    entry = {"step": step, "eval_reward": level, "eval_reward_std_error": 0.02}
    for name in [*REWARDS, evaluated]:
        entry |= {f"eval_rewards/{name}/mean": level, f"eval_rewards/{name}/std_error": 0.03}
    return entry


def write_evaluation(path, step, level, prompts, size, evaluated=EVALUATED):
    folder = path / "evaluations" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    rows = []
    for index in range(prompts):
        image = Image.new("RGB", size, (250, 249, 247))
        ImageDraw.Draw(image).text((8, 8), f"WORD{index} {step}", fill=(200, 40, 40))
        image.save(folder / f"{index:04d}.png")
        rewards = dict.fromkeys([*REWARDS, evaluated], level + 0.01 * (index % 3))
        row = {"step": step, "prompt": f'the word "WORD{index}" in red', "seed": index, "reward": level}
        rows.append({**row, **rewards, "image": f"evaluations/step-{step:06d}/{index:04d}.png"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder.with_suffix(".parquet"))
