"""Plan a run: compute its counts and the memory that it will need before anything is loaded.

The counts come from the settings. The memory is measured on a pipeline without weights (`weightless.py`), which is
prepared by the same code as the real one and updated by the real optimizer's class. DeepSpeed and FSDP2 are assumed to
divide the memory as documented.
"""

import contextlib
import copy
import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from peft import PeftConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import tiny
from ..config.arguments import LaunchArguments, LoraArguments, ScriptArguments
from ..config.parse import parse_train_arguments
from ..config.settings import DiffusionGRPOConfig
from ..data.calls import BATCHED, LISTED, SINGLE, Form
from ..data.inputs import PipelineInputs
from ..distributed.launch import check_processes, read_settings
from ..distributed.refusals import check_optimizer, check_quantization
from ..policy.base import Policy
from ..policy.networks import NetworkAccess
from ..policy.token import make_policy
from ..policy.unguided import switch_guidance_off
from ..training.model import check_reentrant, prepare_model
from ..training.model_checks import check_peft_config, list_components, read_index
from ..weights.lora import read_config
from ..weights.quantization import choose_specs, name_method
from .batches import Batches
from .measure import CallSizes, CountedMasks, Measurement, add_means, measure, measure_renoised
from .memory import Memory, Parts, add_up, estimate_memory, has_old_policy, keeps_means
from .sharding import Sharding, override_launch_settings
from .weightless import build_weightless_pipeline, decode_as_set, find_configuration, move_to_cpu

if TYPE_CHECKING:
    from datasets import Dataset


MEASURED = {  # settings that change temporary memory, but not the parts of the pipeline
    *("per_device_train_batch_size", "decode_batch_size", "vae_slicing", "vae_tiling"),
}
COMPUTED = {  # settings whose effect is computed from a pipeline that was built without them
    *("gradient_accumulation_steps", "steps_per_generation", "optim", "optim_args", "offload_frozen"),
    *("offload_trajectories", "offload_ref_model", "cache_prompt_embeds", "prompt_embeds_dir", "torch_compile"),
    *("group_offload", "group_offload_blocks", "group_offload_stream", "load_in_4bit", "load_in_8bit"),
    *("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "quantization", "ema_decay"),
    *("ds3_gather_for_generation", "fsdp_gather_for_generation"),
}


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
    model: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processes_per_machine: int = 1

    @property
    def total(self) -> Memory:
        """The peak memory."""
        return add_up(self.memory)

    @property
    def cpu_per_machine(self) -> int:
        """Bytes of CPU memory that the processes of one machine use together."""
        return self.total.cpu * self.processes_per_machine

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON."""
        return asdict(self) | {"total": asdict(self.total), "cpu_per_machine": self.cpu_per_machine}


Run = tuple[ScriptArguments, LoraArguments, DiffusionGRPOConfig]


@dataclass
class Prepared:
    """A pipeline without weights that is prepared for training."""

    pipe: Any
    mode: FakeTensorMode
    component: tuple[str, ...]
    parts: Parts


@dataclass
class Built:
    """Results that several plans of one model share, by the settings that they depend on."""

    prepared: dict[str, Prepared] = field(default_factory=dict)
    measured: dict[str, tuple[Measurement | None, list[str]]] = field(default_factory=dict)


def read_run(
    config_file: str | None, overrides: list[str], launch: LaunchArguments | None = None
) -> tuple[Run, dict[str, Any], list[str]]:
    """Read the settings of a run on another machine; see [`plan`]."""
    launch_settings = read_settings(launch or LaunchArguments())
    is_given = "num_processes" in launch_settings
    launch_settings.setdefault("num_processes", launch_settings["num_machines"])
    check_processes(launch_settings)
    planned = make_planned_config(launch_settings["num_processes"])
    run = parse_train_arguments(config_file, overrides, planned)
    launch_settings = override_launch_settings(launch_settings, run[2])
    notes = []
    if not is_given and launch_settings["distributed_type"] != "NO":
        notes.append("num_processes is not given, so one process per machine is planned; add --num_processes N.")
    return run, launch_settings, notes


def plan(
    config_file: str | None,
    overrides: list[str],
    launch: LaunchArguments | None = None,
    built: Built | None = None,
) -> Plan:
    """Plan the run that a YAML file and overrides describe."""
    (script, lora, args), launch_settings, notes = read_run(config_file, overrides, launch)
    sharding = Sharding.of(launch_settings)
    made = Plan(Batches.of(args, None), sharding, notes=notes)
    made.processes_per_machine = max(1, sharding.processes // launch_settings["num_machines"])
    if args.context_parallel_size > 1:
        made.notes.append(
            f"context_parallel_size={args.context_parallel_size} divides the activations of a sample among processes; "
            "they are planned whole."
        )
    rows = _load_rows(script, args.prompt_column, made.notes)
    made.batches = Batches.of(args, None if rows is None else len(rows))
    try:
        folder = tiny.PATH if script.model == "tiny" else find_configuration(script.model)
    except OSError as error:
        made.notes.append(
            f"The model {script.model} is not available here ({type(error).__name__}), so its memory is not planned; "
            "if you have its configuration files in a folder, add --model FOLDER. The plan assumes that the network "
            "is evaluated once per step; with guidance most pipelines evaluate it twice."
        )
        made.evaluations = count_evaluations(args, made.batches, None)
        return made
    with torch.random.fork_rng(devices=[]):
        _plan_model(made, folder, args, lora, rows, built or Built())
    return made


def _load_rows(script: ScriptArguments, prompt_column: str | None, notes: list[str]) -> "Dataset | None":
    from ..data.prompts import load_prompts

    try:
        return load_prompts(script.dataset, script.dataset_train_split, prompt_column)
    except (ValueError, OSError) as error:
        notes.append(f"The dataset {script.dataset} cannot be read here: {' '.join(str(error).split())}")
        return None


def _plan_model(
    made: Plan, folder: Any, args: DiffusionGRPOConfig, lora: LoraArguments, rows: "Dataset | None", built: Built
) -> None:
    if "quantization_config" in (args.model_init_kwargs or {}):
        made.notes.append("model_init_kwargs: quantization_config is not planned; memory is left out.")
        return
    peft_config = lora.peft_config(args.lora_path)
    if args.lora_path is not None:  # a new adapter of the same rank is as large
        peft_config, args.lora_path = read_config(args.lora_path), None
    check_peft_config(peft_config)
    check_reentrant(args, peft_config is None)
    if args.group_offload is not None and (peft_config is None or made.sharding.name not in ("one process", "ddp")):
        raise ValueError(
            f"group_offload={args.group_offload!r} moves the frozen weights under a LoRA, on one process or with DDP; "
            "leave it out."
        )
    check_optimizer(made.sharding.name, getattr(args.optim, "value", args.optim))
    prepared, counted, notes = _build_and_measure(folder, args, peft_config, rows, built)
    parts = prepared.parts
    parts = dataclasses.replace(parts, specs=_find_specs(folder, args, parts, peft_config is None))
    methods = {name_method(parts.specs.get(name)) for name in parts.networks}
    check_quantization(made.sharding.name, methods - {None})
    made.model["pipeline"] = type(prepared.pipe).__name__
    made.notes += notes
    if counted is not None and counted.tokens:
        made.batches.trained_steps, made.batches.trained_tokens = 1, counted.tokens
        made.notes.append("Parts that turn tokens into samples are planned with their weights, without activations.")
    made.model |= {
        "network": ", ".join(parts.networks),
        "weights": sum(p.numel() for p in parts.model.parameters()),
        "trained": sum(p.numel() for p in parts.trained),
    }
    made.evaluations = count_evaluations(args, made.batches, counted)
    made.memory = estimate_memory(parts, args, peft_config, made.sharding, counted, made.batches)


def _find_specs(folder: Path, args: DiffusionGRPOConfig, parts: Parts, is_full_training: bool) -> dict[str, Any]:
    """Find out how each network is quantised, without a check for packages and a GPU, which only the run needs."""
    specs = choose_specs(args, list_components(read_index(str(folder), args)), tuple(parts.networks))
    trained = [name for name in specs if name in parts.networks]
    if trained and is_full_training:
        raise ValueError(f"{', '.join(trained)} is quantised, and only a LoRA can be trained on that; set use_peft.")
    return specs


def _describe(args: DiffusionGRPOConfig, peft_config: PeftConfig | None, others: set[str]) -> str:
    """Return the settings except for `others`, as a key: plans with equal keys can share results."""
    settings = {name: value for name, value in args.to_dict().items() if name not in others}
    return json.dumps([settings, peft_config and peft_config.to_dict()], default=str, sort_keys=True)


def _build_and_measure(
    folder: Any, args: DiffusionGRPOConfig, peft_config: PeftConfig | None, rows: "Dataset | None", built: Built
) -> tuple[Prepared, Measurement | None, list[str]]:
    """Build the pipeline without weights and measure a micro-batch, unless this has been done already.

    Nothing is moved or compressed in this pipeline; the effects of such settings are computed from it.
    """
    simple = copy.copy(args)
    simple.torch_compile, simple.group_offload = False, None
    simple.load_in_4bit, simple.load_in_8bit, simple.quantization = False, False, None
    key = _describe(args, peft_config, COMPUTED | MEASURED)
    if key not in built.prepared:
        built.prepared[key] = _prepare(folder, simple, peft_config)
    prepared, key = built.prepared[key], _describe(args, peft_config, COMPUTED)
    if key not in built.measured:
        notes: list[str] = []
        with decode_as_set(prepared.pipe, simple):
            counted = _measure_or_note(notes, prepared.pipe, prepared.mode, prepared.component, simple, rows)
        built.measured[key] = counted, notes
    return prepared, *built.measured[key]


def _prepare(folder: Any, args: DiffusionGRPOConfig, peft_config: PeftConfig | None) -> Prepared:
    pipe, mode = build_weightless_pipeline(folder, args, peft_config is None)
    component, model = prepare_model(pipe, args, peft_config)
    move_to_cpu(pipe, mode)
    every = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    order = (pipe.model_cpu_offload_seq or "").split("->")
    movable = [name for name in order if name in every and name not in pipe._exclude_from_cpu_offload]
    places = [order.index(name) for name in component if name in order]
    parts = Parts(
        model=model,
        networks={name: every[name] for name in component},
        others={name: part for name, part in every.items() if name not in component},
        moved=tuple(name for name in movable if name not in component),
        decodes=tuple(name for name in movable if places and order.index(name) > max(places)),
    )
    return Prepared(pipe, mode, component, parts)


def _measure_or_note(
    notes: list[str],
    pipe: Any,
    mode: FakeTensorMode,
    component: tuple[str, ...],
    args: DiffusionGRPOConfig,
    rows: "Dataset | None",
) -> Measurement | None:
    """Measure one micro-batch; if the pipeline does not run without weights, add a note and return None."""
    access = NetworkAccess(forward_context=lambda: _make_autocast(args), casts_outputs=args.bf16 or args.fp16)
    try:
        policy = make_policy(pipe, component, sde_type=args.sde_type, sampling=args.token_sampling, access=access)
        inputs = PipelineInputs(pipe, args)
        row = {"prompt": "a photo of a cat"} if rows is None else inputs.rows(rows, [0])[0]
        with CountedMasks():
            return _measure_in_some_form(policy, mode, inputs, row, args)
    except Exception as error:  # a pipeline may fail in any way on tensors without values
        notes.append(
            f"{type(pipe).__name__} does not run without weights, so only memory that is always used is planned "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        )
        return None


def _measure_in_some_form(
    policy: Policy, mode: FakeTensorMode, inputs: PipelineInputs, row: dict[str, Any], args: DiffusionGRPOConfig
) -> Measurement:
    """Measure a micro-batch in the first form in which the pipeline takes it; see `learn_forms`.

    The form cannot be probed as in training, because tensors without values do not change.
    """
    given = frozenset(name for name in inputs.accepted & row.keys() if row[name] is not None)
    refusals = []
    for form in (BATCHED, SINGLE, LISTED):
        inputs.forms[given] = Form(form)
        sizes = CallSizes.of(args) if form == BATCHED else CallSizes(1, 1, 1)
        try:
            counted = measure(policy, mode, lambda count: inputs([row] * count), sizes, args)
        except Exception as error:  # whatever goes wrong inside the pipeline is an answer to the question
            refusals.append(error)
            continue
        counted = dataclasses.replace(counted, is_batched=form == BATCHED)
        if not args.is_renoised:
            return add_means(counted) if keeps_means(args) else counted

        def make_unguided(count: int) -> dict[str, Any]:
            return switch_guidance_off(policy.pipe, policy.networks, inputs([row] * count))

        unguided = measure(policy, mode, make_unguided, sizes, args)
        return measure_renoised(counted, unguided, has_old_policy(args))
    raise refusals[0]


def _make_autocast(args: DiffusionGRPOConfig) -> contextlib.AbstractContextManager:
    if not (args.bf16 or args.fp16):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16 if args.bf16 else torch.float16, cache_enabled=False)


def count_evaluations(args: DiffusionGRPOConfig, batches: Batches, counted: Measurement | None) -> dict[str, float]:
    """Count forward passes per sample; if `counted` is None, assume one pass per step and shared calls.

    Each token is drawn by one pass, and all tokens are scored by one pass.
    """
    one, update = (1.0, 1.0) if counted is None else (counted.evaluations, counted.update_evaluations)
    steps, iterations = batches.trained_steps, args.num_iterations
    shares_prediction = args.shares_calls and (counted is None or counted.shares_prediction)
    shared_calls = args.shared_calls - (args.shares_calls and not shares_prediction)
    rollout = one * (batches.num_inference_steps - shared_calls * (1 - 1 / args.latent_sharing))
    if shares_prediction and (counted is None or counted.is_batched):
        steps -= args.trained_share * (1 - 1 / min(args.trained_sharing, args.per_device_train_batch_size))
    found = {"in one step": one, "rollout": rollout, "update, with gradient": update * steps * iterations}
    if counted is not None and counted.tokens:
        scores = {"scores of the rollout's tokens": 1.0, "update, with gradient": iterations}
        found = {"rollout, one per token": float(counted.tokens), **scores}
    if args.beta > 0 or args.recording.reference:
        found["reference in the update"] = update * steps * iterations
    if has_old_policy(args):
        found["old policy"] = update * steps
    if args.anchor == "replay" and args.recording.old == "error":
        found["errors before the first update"] = update * steps
    if args.kl_reward > 0:
        found["policy and reference for kl_reward"] = 2 * one * steps
    if args.importance_sampling_level == "sequence" and batches.updates_per_rollout > 1:
        share = 1 - args.gradient_accumulation_steps / (args.micro_batches_per_rollout * iterations)
        found["sequence ratio"] = one * steps * iterations * share
    return found
