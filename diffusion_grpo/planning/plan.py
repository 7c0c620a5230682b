"""`Plan`: read a run's settings as for another machine, and put together its counts, measurement and memory.

The counts (`batches.py`) come from the settings. The memory (`memory.py`) comes from a measurement (`measure.py`) on a
pipeline without weights (`weightless.py`), which is prepared by the same code as the real one and updated by the real
optimizer's class. DeepSpeed and FSDP2 are assumed to divide the memory as documented.
"""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from peft import LoraConfig, PeftConfig

from .. import tiny
from ..config.arguments import LaunchArguments, LoraArguments, ScriptArguments
from ..config.parse import parse_train_arguments
from ..config.settings import DiffusionGRPOConfig
from ..data.call_form import call_in_some_form
from ..data.inputs import BATCHED, Form, PipelineInputs
from ..distributed.launch import check_processes, read_settings
from ..distributed.refusals import check_group_offload, check_optimizer, check_quantization
from ..policy.networks import NetworkAccess
from ..policy.token import make_policy
from ..training.model import check_reentrant
from ..training.model_checks import check_peft_config
from ..training.model_index import list_components, read_index
from ..weights.quantization import choose_specs, name_method
from .batches import Batches, count_batches, count_evaluations
from .measure import CallSizes, Measurement, measure
from .memory import Memory, add_up, estimate_memory
from .sharding import Sharding, override_launch_settings
from .weightless import Parts, find_configuration, prepare_parts

if TYPE_CHECKING:
    from datasets import Dataset


COMPUTED = {  # settings whose effect is computed from a pipeline that was built without them
    *("gradient_accumulation_steps", "steps_per_generation", "optim", "optim_args", "offload_frozen"),
    *("offload_trajectories", "offload_ref_model", "cache_prompt_embeds", "prompt_embeds_dir", "torch_compile"),
    *("group_offload", "group_offload_blocks", "group_offload_stream", "load_in_4bit", "load_in_8bit"),
    *("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "quantization", "ema_decay"),
    *("ds3_gather_for_generation", "fsdp_gather_for_generation"),
}
Cache = dict[str, Any]  # what several plans of one model share, by the settings on which it depends


def make_planned_config(processes: int) -> type[DiffusionGRPOConfig]:
    """Return a settings class for that many processes with accelerators, whatever this machine has."""

    class PlannedConfig(DiffusionGRPOConfig):
        world_size: ClassVar[int] = processes

        def __post_init__(self):
            if self.bf16 is None:
                self.bf16 = not self.fp16 and not self.use_cpu
            # TrainingArguments would check tf32 on this machine and switch it on,
            tf32, self.tf32 = self.tf32, None
            # and would start DeepSpeed
            deepspeed, self.deepspeed = self.deepspeed, None
            super().__post_init__()
            self.tf32, self.deepspeed = tf32, deepspeed

        def _validate_args(self) -> None:
            use_cpu, self.use_cpu = self.use_cpu, True  # otherwise bf16 is refused if this machine lacks it
            try:
                super()._validate_args()
            finally:
                self.use_cpu = use_cpu

        def check_machine(self) -> None:
            """Do nothing: the run is planned for another machine."""

    return PlannedConfig


@dataclass
class Plan:
    """Counts and bytes of a run."""

    batches: Batches
    sharding: Sharding
    processes_per_machine: int
    model: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Memory:
        return add_up(self.memory)

    @property
    def cpu_per_machine(self) -> int:
        """Bytes of CPU memory that the processes of one machine use together."""
        return self.total.cpu * self.processes_per_machine

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": asdict(self.total), "cpu_per_machine": self.cpu_per_machine}


def read_run(
    config_file: str | None, overrides: list[str], launch: LaunchArguments | None = None
) -> tuple[tuple[ScriptArguments, LoraArguments, DiffusionGRPOConfig], dict[str, Any], list[str]]:
    """Read the settings of a run on another machine; see [`plan`]."""
    launch_settings, notes = read_settings(launch or LaunchArguments()), []
    if "num_processes" not in launch_settings and launch_settings["distributed_type"] != "NO":
        notes.append("num_processes is not given, so one process per machine is planned; add --num_processes N.")
    launch_settings.setdefault("num_processes", launch_settings["num_machines"])
    check_processes(launch_settings)
    run = parse_train_arguments(config_file, overrides, make_planned_config(launch_settings["num_processes"]))
    return run, override_launch_settings(launch_settings, run[2]), notes


def plan(
    config_file: str | None, overrides: list[str], launch: LaunchArguments | None = None, cache: Cache | None = None
) -> Plan:
    """Plan the run that a YAML file and overrides describe; plans with one cache share what they measure."""
    (script, lora, args), launch_settings, notes = read_run(config_file, overrides, launch)
    if args.context_parallel_size > 1:
        notes.append(
            f"context_parallel_size={args.context_parallel_size} divides the activations of a sample among processes; "
            "they are planned whole."
        )
    rows, sharding = _load_rows(script, args.prompt_column, notes), Sharding.of(launch_settings)
    batches = count_batches(args, None if rows is None else len(rows))
    made = Plan(batches, sharding, max(1, sharding.processes // launch_settings["num_machines"]), notes=notes)
    try:
        folder = tiny.PATH if script.model == "tiny" else find_configuration(script.model)
    except OSError as error:
        notes.append(
            f"The model {script.model} is not available here ({type(error).__name__}), so its memory is not planned; "
            "if you have its configuration files in a folder, add --model FOLDER. The plan assumes that the network "
            "is evaluated once per step; with guidance most pipelines evaluate it twice."
        )
        made.evaluations = count_evaluations(args)
        return made
    with torch.random.fork_rng(devices=[]):
        _plan_model(made, folder, args, lora, rows, {} if cache is None else cache)
    return made


def _load_rows(script: ScriptArguments, prompt_column: str | None, notes: list[str]) -> "Dataset | None":
    from ..data.prompts import load_prompts

    try:
        return load_prompts(script.dataset, script.dataset_train_split, prompt_column)
    except (ValueError, OSError) as error:
        notes.append(f"The dataset {script.dataset} cannot be read here: {' '.join(str(error).split())}")
        return None


def _plan_model(
    made: Plan, folder: Path, args: DiffusionGRPOConfig, lora: LoraArguments, rows: "Dataset | None", cache: Cache
) -> None:
    if "quantization_config" in (args.model_init_kwargs or {}):
        made.notes.append("model_init_kwargs: quantization_config is not planned; memory is left out.")
        return
    peft_config = lora.peft_config(args.lora_path)
    if args.lora_path is not None:  # a new adapter of the same rank is as large
        peft_config, args.lora_path = LoraConfig.from_pretrained(args.lora_path), None
    is_full_training, sharding = peft_config is None, made.sharding
    check_peft_config(peft_config)
    check_reentrant(args, is_full_training)
    if args.group_offload is not None:
        check_group_offload(sharding.name, is_full_training)
    check_optimizer(sharding.name, getattr(args.optim, "value", args.optim))
    parts, (counted, notes) = _build_and_measure(folder, args, peft_config, rows, cache)
    made.notes += notes
    specs = choose_specs(args, list_components(read_index(str(folder), args)), tuple(parts.networks))
    parts = dataclasses.replace(parts, specs=specs)
    quantised = [name for name in specs if name in parts.networks]
    if quantised and is_full_training:
        raise ValueError(f"{', '.join(quantised)} is quantised, and only a LoRA can be trained on that; set use_peft.")
    check_quantization(sharding.name, {name_method(specs[name]) for name in quantised} - {None})
    if counted is not None and counted.tokens:
        made.batches |= {"trained_steps": 1, "trained_tokens": counted.tokens}
        made.notes.append("Parts that turn tokens into samples are planned with their weights, without activations.")
    made.model = {
        "pipeline": type(parts.pipe).__name__,
        "network": ", ".join(parts.networks),
        "weights": sum(p.numel() for p in parts.model.parameters()),
        "trained": sum(p.numel() for p in parts.trained),
    }
    made.evaluations = count_evaluations(args, counted)
    made.memory = estimate_memory(parts, args, is_full_training, sharding, counted, made.batches)


def _build_and_measure(
    folder: Path, args: DiffusionGRPOConfig, peft_config: PeftConfig | None, rows: "Dataset | None", cache: Cache
) -> tuple[Parts, tuple[Measurement | None, list[str]]]:
    """Build the pipeline without weights and measure a micro-batch, unless this has been done already."""
    # nothing is moved or compressed in it; the effects of such settings are computed from it
    simple = copy.copy(args)
    simple.torch_compile, simple.group_offload = False, None
    simple.load_in_4bit, simple.load_in_8bit, simple.quantization = False, False, None

    def recall(others: set[str], make: Callable[[], Any]) -> Any:
        settings = {name: value for name, value in args.to_dict().items() if name not in others}
        key = json.dumps([settings, peft_config and peft_config.to_dict(), len(others)], default=str, sort_keys=True)
        if key not in cache:
            cache[key] = make()
        return cache[key]

    parts = recall(COMPUTED | {"per_device_train_batch_size"}, lambda: prepare_parts(folder, simple, peft_config))
    return parts, recall(COMPUTED, lambda: _measure_or_note(parts, simple, rows))


def _measure_or_note(
    parts: Parts, args: DiffusionGRPOConfig, rows: "Dataset | None"
) -> tuple[Measurement | None, list[str]]:
    """Measure one micro-batch; if the pipeline does not run without weights, return None and a note."""
    pipe, is_half = parts.pipe, args.bf16 or args.fp16

    def make_autocast() -> contextlib.AbstractContextManager:
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        return torch.autocast("cpu", dtype, cache_enabled=False) if is_half else contextlib.nullcontext()

    def measure_form(form: str) -> Measurement:  # not probed as in training: tensors without values do not change
        inputs.forms[columns] = Form(form)
        sizes = CallSizes.of(args) if form == BATCHED else CallSizes(1, 1, 1)
        counted = measure(policy, parts.mode, lambda count: inputs([row] * count), sizes, args)
        return dataclasses.replace(counted, is_batched=form == BATCHED)

    try:
        access = NetworkAccess(forward_context=make_autocast, casts_outputs=is_half)
        sampling = args.token_sampling
        policy = make_policy(pipe, tuple(parts.networks), sde_type=args.sde_type, sampling=sampling, access=access)
        inputs = PipelineInputs(pipe, args)
        row = {"prompt": "a photo of a cat"} if rows is None else inputs.rows(rows, [0])[0]
        columns = frozenset(name for name in inputs.accepted & row.keys() if row[name] is not None)
        return call_in_some_form(measure_form)[0], []
    except Exception as error:  # a pipeline may fail in any way on tensors without values
        return None, [
            f"{type(pipe).__name__} does not run without weights, so only memory that is always used is planned "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        ]
