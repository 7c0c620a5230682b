"""Settings that only the command line takes: model, data, rewards, an earlier experiment, LoRA, processes."""

import json
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from .declare import Count, Range, setting
from .files import read_text

if TYPE_CHECKING:
    from peft import LoraConfig

LAUNCH_VARIABLE = "DIFFUSION_GRPO_LAUNCH"  # tells the processes of a run what they were started with


@dataclass
class ScriptArguments:
    """What is trained, on which prompts, with which rewards."""

    model: str = setting(MISSING, "Hub id or folder of a diffusers pipeline, or `tiny` for the embedded model.")
    dataset: str = setting(
        MISSING,
        "Prompts: a .txt (one per line), .jsonl, .json, .csv or .parquet file, a folder written by `save_to_disk`, a "
        "Hub id, or `tiny`.",
    )
    reward_funcs: list[str] | dict[str, Any] = setting(
        MISSING,
        "Rewards to train on: names of built-in ones or dotted paths of functions, such as `my_module.my_reward`; or "
        "a mapping from these to weights or options (docs/rewards/own.md).",
    )
    dataset_train_split: str = setting("train", "Split of `dataset` to train on.")
    eval_dataset: str | None = setting(
        None,
        "Held-out prompts, in any form that `dataset` accepts. Without them nothing is evaluated.",
    )
    dataset_test_split: str = setting("test", "Split of `eval_dataset` to evaluate on.")
    eval_max_prompts: Count | None = setting(None, "Evaluate on the first N held-out prompts; by default on all.")
    eval_reward_funcs: list[str] | dict[str, Any] | None = setting(
        None,
        "Evaluation-only rewards, written like `reward_funcs`.",
    )
    baseline_guidance_scales: list[float] | None = setting(
        None, "Guidance scales at which the untrained model is evaluated before training."
    )
    report_experiment: str | None = setting(
        None,
        "JSON file of an earlier experiment to show in the report (docs/metrics.md); in a YAML file, relative to "
        "that file.",
    )

    def __post_init__(self):
        if self.baseline_guidance_scales and self.eval_dataset is None:
            raise ValueError("baseline_guidance_scales needs held-out prompts to be measured on: set eval_dataset.")
        if self.report_experiment is not None:
            try:
                read_experiment(self.report_experiment)
            except ValueError as error:
                raise ValueError(f"report_experiment: {error}") from error


def read_experiment(path: str | Path) -> dict[str, Any]:
    """Read the JSON file of an earlier experiment, which the report shows as a table."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}.")
    try:
        experiment = json.loads(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    lists = ("columns", "rows")
    if not isinstance(experiment, dict) or not all(isinstance(experiment.get(name), list) for name in lists):
        raise ValueError(f"{path} holds no experiment; expected an object with the lists `columns` and `rows`.")
    return experiment


NAME = re.compile(r"[\w.]+")  # a name of a layer, not an expression or `all-linear`
LORA_INITS = {"kaiming": True, "gaussian": "gaussian"}  # PEFT's init_lora_weights


@dataclass
class LoraArguments:
    """Settings of a LoRA, under TRL's names; without `use_peft` every weight of the policy is trained.

    TRL's `ModelConfig` has settings of language models, uses dropout by default, and cannot choose `lora_init`.
    """

    use_peft: bool = setting(False, "Train a LoRA instead of all weights.")
    lora_r: Count = setting(16, "Rank of the LoRA.")
    lora_alpha: int = setting(32, "Scale of the LoRA: its output is multiplied by lora_alpha / lora_r.")
    lora_target_modules: list[str] | None = setting(
        None,
        "Layers that get a LoRA, by the last part of their names; a single entry may be a regular expression or "
        "`all-linear`. By default to_q, to_k, to_v, to_out.0, and in a language model q_proj, k_proj, v_proj, o_proj.",
    )
    lora_init: Literal["kaiming", "gaussian"] = setting(
        "kaiming",
        "Initial values of the LoRA's first factor: kaiming (PEFT's default), or gaussian with std 1 / lora_r "
        "(Flow-GRPO). The second factor starts at 0.",
    )
    lora_dropout: Annotated[float, Range(0, 0)] = setting(0.0, "Must be 0: dropout makes the replay inexact.")

    def peft_config(self, lora_path: str | None = None) -> "LoraConfig | None":
        """Return the configuration of a new LoRA; None for full training and for the LoRA at `lora_path`."""
        if lora_path is not None:
            others = [f.name for f in fields(self) if f.name != "use_peft" and getattr(self, f.name) != f.default]
            if others:
                raise ValueError(f"lora_path names a LoRA that has its own rank and layers; leave out {others[0]}.")
            return None
        if not self.use_peft:
            return None
        from peft import LoraConfig

        modules: list[str] | str | None = self.lora_target_modules
        if modules is not None and len(modules) == 1 and not NAME.fullmatch(modules[0]):
            modules = modules[0]
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=0.0,
            init_lora_weights=LORA_INITS[self.lora_init],
            target_modules=modules,
        )


@dataclass
class LaunchArguments:
    """How many processes to start and what they shard, in accelerate's names. If all are None, none is started."""

    accelerate_config: str | None = setting(
        None,
        "What the processes share: single_gpu, multi_gpu, multi_node, zero1, zero2, zero3, zero3_offload or fsdp2 "
        "(docs/distributed.md), or a file written by `accelerate config`.",
    )
    num_processes: Count | None = setting(
        None,
        "Number of processes on all machines. By default one, or one per accelerator with accelerate_config.",
    )
    num_machines: Count | None = setting(
        None, "Number of machines. Start the same command on each, with its own machine_rank."
    )
    machine_rank: int | None = setting(None, "Index of this machine, from 0.")
    main_process_ip: str | None = setting(None, "Address of the machine with rank 0.")
    main_process_port: int | None = setting(
        None, "Port on that machine. With a single machine, by default a free one."
    )

    @property
    def is_empty(self) -> bool:
        """Whether no process is to be started."""
        return all(value is None for value in vars(self).values())
