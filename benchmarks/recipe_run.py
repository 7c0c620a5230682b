"""Train the embedded model by one recipe until its network passes are used up, and measure it on the way."""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from demo_seeds import ROOT, machine
from recipe_settings import BASE, DEMO, Recipe
from torch.optim.lr_scheduler import LambdaLR
from torch.utils import _pytree as pytree
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import enable_tf32

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.training.callbacks import ReportCallback
from diffusion_grpo.training.progress import RewardProgressCallback

COSTS = {"forward": 1, "gradient": 3, "checkpointed": 4}  # of a call: alone, with its backward pass, recomputed in it
WARMUP = 3  # updates; Adam's first steps have full size, whatever the gradient


class PassCounter:
    """Counts the rows that pass a network, at the costs of `COSTS`: `passes`.

    The class's `forward` is wrapped, so copies of the network (references, old policies) count too. Hooks would not
    do: they also run where a replay skips the network because the step's result is known. A guided call has two rows
    per sample.
    """

    def __init__(self):
        self.passes = 0

    @contextlib.contextmanager
    def watch(self, network_class: type[torch.nn.Module]) -> Iterator[None]:
        """Count every call of networks of this class inside the context."""
        real = network_class.forward

        @functools.wraps(real)
        def forward(network, *args, **kwargs):
            output = real(network, *args, **kwargs)
            first = next(leaf for leaf in pytree.tree_leaves(output) if torch.is_tensor(leaf))
            kind = "forward"
            if first.requires_grad:
                kind = "checkpointed" if network.is_gradient_checkpointing else "gradient"
            self.passes += COSTS[kind] * len(first)
            return output

        network_class.forward = forward
        try:
            yield
        finally:
            network_class.forward = real


class Race(TrainerCallback):
    """Evaluates about every `eval_passes` passes, and stops the run when the next update would exceed its budget.

    The next update is expected to cost as much as those before on average. Where updates differ in price (of two
    updates on one rollout, the first pays for it), a run may end a little above its budget.

    Args:
        evaluate: takes pipeline arguments, returns metrics whose names begin with `race_`.
        counter: of the network's passes.
        samples: of the rollout for each update.
        max_passes: the budget: passes per sample of an update, summed over updates.
        max_updates: ends the run earlier.
        eval_passes: passes between two evaluations.
        guidance: at which the recipe trains; where it is not 1, each evaluation is made with it too.
    """

    def __init__(
        self,
        evaluate: Callable[[dict[str, Any]], dict[str, float]],
        counter: PassCounter,
        *,
        samples: int,
        max_passes: float,
        max_updates: int | None,
        eval_passes: float,
        guidance: float,
    ):
        self.evaluate, self.counter, self.samples, self.guidance = evaluate, counter, samples, guidance
        self.max_passes, self.max_updates, self.eval_passes = max_passes, max_updates, eval_passes
        self.curves: dict[str, list[float]] = defaultdict(list)
        self.start, self.evaluating = 0.0, 0.0  # seconds of this process on the CPU, which other work hardly moves

    @property
    def passes(self) -> float:
        """Passes per sample of an update so far, evaluations not among them."""
        return self.counter.passes / self.samples

    @property
    def cpu_seconds(self) -> float:
        """Seconds of training so far, without evaluations."""
        return time.process_time() - self.start - self.evaluating

    def scale_learning_rate(self, update: int) -> float:
        """Return the factor of the learning rate: a short warm-up, then linear to 0 at the end of the budget.

        By passes and not by updates, since the price of an update is known once one has been made.
        """
        return min(1.0, (update + 1) / (WARMUP + 1)) * max(0.0, 1 - self.passes / self.max_passes)

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.process_time()
        self._measure(0)

    def on_step_end(self, args, state, control, **kwargs):
        updates = state.global_step
        next_one = self.passes * (updates + 1) / updates
        control.should_training_stop = next_one > self.max_passes or updates == self.max_updates
        is_due = self.passes // self.eval_passes > self.curves["passes"][-1] // self.eval_passes
        if is_due or control.should_training_stop:
            self._measure(updates)

    def _measure(self, update: int) -> None:
        begun, before = time.process_time(), self.counter.passes
        measured = {"update": update, "passes": round(self.passes, 4), "cpu_seconds": round(self.cpu_seconds, 2)}
        measured |= read_rewards(self.evaluate({"guidance_scale": 1.0}), "reward", "tesseract")
        if self.guidance != 1:
            guided = self.evaluate({"guidance_scale": self.guidance})
            measured |= read_rewards(guided, "guided", "guided_tesseract")
        for name, value in measured.items():
            self.curves[name].append(value)
        self.counter.passes = before  # evaluations are free
        self.evaluating += time.process_time() - begun
        print("  " + "  ".join(f"{name} {value:g}" for name, value in measured.items()), flush=True)


def read_rewards(metrics: dict[str, float], reward: str, tesseract: str) -> dict[str, float]:
    """Return the weighted reward of an evaluation, and Tesseract's, which is never trained on, by these names."""
    return {
        reward: round(metrics["race_reward"], 6),
        tesseract: round(metrics["race_rewards/tesseract/mean"], 6),
    }


def parse_recipe(
    recipe: Recipe, learning_rate: float, seed: int, folder: str, sizes: dict[str, Any] | None = None
) -> tuple[Any, Any, Any]:
    """Return the arguments of script, LoRA and run: the demo's with what `BASE`, the recipe and the race change.

    With `best_of_n`, micro-batches are smaller: as many samples are made for an update as by other recipes, and fewer
    of them are trained on.

    Raises:
        ValueError: the settings are unknown or contradict each other.
    """
    settings = BASE | recipe.settings | {"learning_rate": learning_rate, "seed": seed, "output_dir": folder}
    settings |= {"eval_strategy": "no", "eval_on_start": False, "baseline_guidance_scales": None}
    settings |= {"report_experiment": None, "log_completions": False, "disable_tqdm": True}
    settings |= {"bf16": False}  # on a GPU too
    settings |= {"max_steps": 1_000_000} | (sizes or {})  # the budget ends the run
    parsed = parse_settings(settings)
    *_, config = parsed
    if not config.best_of_n:
        return parsed
    made = config.per_device_train_batch_size
    trained = made * config.best_of_n // config.num_generations
    return parse_settings(settings | {"per_device_train_batch_size": trained, "rollout_batch_size": made})


def parse_settings(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the arguments of script, LoRA and run: the demo's with these changes."""
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return parse_train_arguments(str(ROOT / DEMO), [f"--{name}={value}" for name, value in words.items()])


def count_samples(config: Any) -> int:
    """Return how many samples are made for an update; those of a rollout that is trained on twice count twice."""
    sizes = config.batch_sizes
    return sizes.samples_per_rollout * sizes.num_iterations // sizes.updates_per_rollout


def train_row(
    recipe: Recipe,
    learning_rate: float,
    seed: int,
    *,
    max_passes: float,
    max_updates: int | None = None,
    eval_passes: float,
    sizes: dict[str, Any] | None = None,
    describe: Callable[[Any], dict[str, Any]] = lambda trainer: {},
) -> dict[str, Any]:
    """Train by a recipe, and return its row.

    On a GPU, it trains in float32 without TF32, from the same noise as on a CPU: only the rounding differs.

    Args:
        recipe: what is changed in the demo.
        learning_rate: at its peak.
        seed: of the run and of its evaluations.
        max_passes: the budget, in network passes per sample of an update, summed over the updates.
        max_updates: ends the run earlier; the learning rate still falls as for the whole budget.
        eval_passes: passes between two evaluations.
        sizes: other settings of the run, such as those of a smaller one for tests.
        describe: takes the trainer at the end, returns more of the row.
    """
    counter, commit = PassCounter(), read_commit()  # before the run: a checkout may move on meanwhile
    enable_tf32(False)
    with tempfile.TemporaryDirectory() as folder:
        updates = recipe.passes_per_update and {"max_steps": round(max_passes / recipe.passes_per_update)}
        script, lora, config = parse_recipe(recipe, learning_rate, seed, folder, (updates or {}) | (sizes or {}))
        trainer = build_trainer(script, lora, config)
        for callback in (PrinterCallback, RewardProgressCallback, ReportCallback):
            trainer.remove_callback(callback)
        race = Race(
            lambda kwargs: trainer.evaluate(metric_key_prefix="race", pipeline_kwargs=kwargs),
            counter,
            samples=count_samples(config),
            max_passes=max_passes,
            max_updates=max_updates,
            eval_passes=eval_passes,
            guidance=config.guidance_scale,
        )
        trainer.add_callback(race)
        trainer.lr_scheduler = LambdaLR(trainer.create_optimizer(), race.scale_learning_rate)
        with counter.watch(type(trainer.pipe.transformer)):
            trainer.train()
        cpu_seconds, more = race.cpu_seconds, describe(trainer)
    row = {"recipe": recipe.name, "learning_rate": learning_rate, "seed": seed}
    row |= {"max_passes": max_passes, "eval_passes": eval_passes}
    row |= {"updates": trainer.state.global_step, "cpu_seconds": round(cpu_seconds, 1)}
    return row | more | describe_machine() | {"commit": commit, "curves": dict(race.curves)}


def measure_cost(recipe: Recipe, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the CPU time of a recipe's passes, from its third and fourth update.

    The first two are left out as a warm-up. If two updates share a rollout, the next two are a whole rollout's.

    Args:
        recipe: what is changed in the demo.
        sizes: settings of a smaller run, for tests.
    """
    sizes = {"eval_max_prompts": 2} | (sizes or {})  # evaluations mark the updates, and are not measured
    row = train_row(recipe, 1e-4, 0, max_passes=recipe.max_passes, max_updates=4, eval_passes=0.01, sizes=sizes)
    second, fourth = (row["curves"]["update"].index(update) for update in (2, 4))
    passes, seconds = (row["curves"][key][fourth] - row["curves"][key][second] for key in ("passes", "cpu_seconds"))
    cost = {"recipe": recipe.name, "cpu_seconds_per_pass": round(seconds / passes, 4)}
    return cost | {"machine": row["machine"], "commit": row["commit"]}


def describe_machine() -> dict[str, str]:
    """Return what times and rounding depend on: the processor or GPU, and a preloaded library if there is one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else machine()
    preload = Path(os.environ.get("LD_PRELOAD", "")).name  # such as mkl_avx512.so
    return {"machine": name} | ({"preload": preload} if preload else {})


def read_commit() -> str:
    """Return the commit of this checkout, with `-dirty` where tracked files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
