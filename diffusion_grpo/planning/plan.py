"""Plan of a run: the counts and the memory that it will need, computed before anything is loaded.

The counts come from the settings. The memory is measured on a pipeline without weights (`weightless.py`), which is
prepared by the same code as the real one and updated by the real optimizer's class. DeepSpeed and FSDP2 are taken to
divide it as they document.
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Trainer
from transformers.training_args import OptimizerNames

from .. import tiny
from ..algorithms.choose import load_algorithm
from ..config.arguments import LaunchArguments, LoraArguments, ScriptArguments
from ..config.parse import parse_train_arguments
from ..config.settings import DiffusionGRPOConfig
from ..data.inputs import PipelineInputs
from ..distributed.launch import check_processes, read_settings
from ..distributed.sharding import Sharding
from ..policy.base import Policy
from ..policy.batching import BATCHED, LISTED, SINGLE, Form
from ..policy.network_gate import NetworkAccess
from ..policy.token import make_policy
from ..policy.unguided import switch_guidance_off
from ..run import adapters
from ..training.model import check_peft_config, prepare_model
from .batches import Batches
from .weightless import (
    CountedMasks,
    Measurement,
    build_weightless_pipeline,
    find_configuration,
    measure,
    measure_renoised,
    move_to_cpu,
)

if TYPE_CHECKING:
    from datasets import Dataset

OPTIMIZER_BLOCK = 256  # values that share a scale in the 8-bit states of bitsandbytes
OPTIMIZER_SMALL = 4096  # bitsandbytes keeps 32-bit states of smaller tensors


def make_planned_config(processes: int) -> type[DiffusionGRPOConfig]:
    """Return a settings class for that many processes with accelerators, whatever this machine has."""

    class PlannedConfig(DiffusionGRPOConfig):
        world_size: ClassVar[int] = processes

        def __post_init__(self):
            if self.bf16 is None:
                self.bf16 = not self.fp16 and not self.use_cpu
            # TrainingArguments would check tf32 on this machine and switch it on
            tf32, self.tf32 = self.tf32, None
            super().__post_init__()
            self.tf32 = tf32

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
class Memory:
    """Bytes of one kind on one process.

    Attributes:
        name: the kind.
        accelerator, cpu: bytes on the accelerator and in CPU memory.
        basis: where the numbers come from.
    """

    name: str
    accelerator: int = 0
    cpu: int = 0
    basis: str = ""


@dataclass
class Plan:
    """Counts and bytes of a run.

    Attributes:
        batches: counts of prompts, samples and updates.
        sharding: how the training state is divided.
        model: `pipeline`, `network`, `weights` and `trained` (numbers of parameters); empty if the model's
            configuration files are not found.
        evaluations: forward passes of the network per sample, by purpose.
        memory: bytes per process, by kind; empty if the model's configuration files are not found.
        notes: sentences about what could not be planned.
    """

    batches: Batches
    sharding: Sharding
    model: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Memory:
        """Sum of all kinds."""
        sums = (sum(getattr(item, where) for item in self.memory) for where in ("accelerator", "cpu"))
        return Memory("total", *sums)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON."""
        return asdict(self) | {"total": asdict(self.total)}


def plan(config_file: str | None, overrides: list[str], launch: LaunchArguments | None = None) -> Plan:
    """Plan the run that a YAML file and overrides describe.

    Args:
        config_file: YAML file, as for `diffusion-grpo train`.
        overrides: words `--key value` that override the file.
        launch: processes to plan for, by default one. The hardware of this machine does not matter.

    Raises:
        ValueError: the run would refuse these settings too.
    """
    launch_settings = read_settings(launch or LaunchArguments())
    is_counted = "num_processes" in launch_settings
    launch_settings.setdefault("num_processes", launch_settings["num_machines"])
    check_processes(launch_settings)
    sharding = Sharding.of(launch_settings)
    script, lora, args = parse_train_arguments(config_file, overrides, make_planned_config(sharding.processes))
    made = Plan(Batches.of(args, None), sharding)
    if not is_counted and launch_settings["distributed_type"] != "NO":
        made.notes.append("num_processes is not given, so one process per machine is planned; add --num_processes N.")
    rows = _load_rows(script, made.notes)
    made.batches = Batches.of(args, None if rows is None else len(rows))
    try:
        folder = tiny.PATH if script.model == "tiny" else find_configuration(script.model)
    except OSError as error:
        made.notes.append(
            f"The model {script.model} is not here ({type(error).__name__}), so its memory is not planned; with its "
            "configuration files in a folder: --model FOLDER. One evaluation of the network in a step is assumed; "
            "with guidance it is two in most pipelines."
        )
        made.evaluations = count_evaluations(args, made.batches, None)
        return made
    with torch.random.fork_rng(devices=[]):
        _plan_model(made, folder, args, lora, rows)
    return made


def _load_rows(script: ScriptArguments, notes: list[str]) -> "Dataset | None":
    from ..data.prompts import load_prompts

    try:
        return load_prompts(script.dataset, split=script.dataset_train_split)
    except (ValueError, OSError) as error:
        notes.append(f"The dataset {script.dataset} cannot be read here: {' '.join(str(error).split())}")
        return None


def _plan_model(
    made: Plan, folder: Any, args: DiffusionGRPOConfig, lora: LoraArguments, rows: "Dataset | None"
) -> None:
    if "quantization_config" in (args.model_init_kwargs or {}):
        made.notes.append("model_init_kwargs: quantization_config is not planned; memory is left out.")
        return
    peft_config = lora.peft_config(args.lora_path)
    if args.lora_path is not None:  # a new adapter of the same rank is as large
        peft_config, args.lora_path = adapters.read_config(args.lora_path), None
    check_peft_config(peft_config, args.needs_reference)
    pipe, mode = build_weightless_pipeline(folder, args, peft_config is None)
    component, model = prepare_model(pipe, args, peft_config)
    move_to_cpu(pipe, mode)
    counted = _measure_or_note(made, pipe, mode, component, args, rows)
    if counted is not None and counted.tokens:
        made.batches.trained_steps, made.batches.trained_tokens = 1, counted.tokens
    every, trained = list(model.parameters()), [p for p in model.parameters() if p.requires_grad]
    made.model = {
        "pipeline": type(pipe).__name__,
        "network": ", ".join(component),
        "weights": sum(p.numel() for p in every),
        "trained": sum(p.numel() for p in trained),
    }
    made.evaluations = count_evaluations(args, made.batches, counted)
    frozen = _count_bytes(p for _, part in _find_other_parts(pipe, component) for p in part.parameters())
    made.memory = estimate_memory(model, frozen, args, peft_config, made.sharding, counted, made.batches)


def _measure_or_note(
    made: Plan,
    pipe: Any,
    mode: FakeTensorMode,
    component: tuple[str, ...],
    args: DiffusionGRPOConfig,
    rows: "Dataset | None",
) -> Measurement | None:
    """Measure one micro-batch; where the pipeline does not run without weights, note it and return None."""
    access = NetworkAccess(forward_context=lambda: _make_autocast(args), casts_outputs=args.bf16 or args.fp16)
    try:
        policy = make_policy(pipe, component, sde_type=args.sde_type, sampling=args.token_sampling, access=access)
        inputs = PipelineInputs(pipe, args)
        row = {"prompt": "a photo of a cat"} if rows is None else inputs.rows(rows, [0])[0]
        with CountedMasks():
            return _measure_in_some_form(policy, mode, inputs, row, args)
    except Exception as error:  # a pipeline may fail in any way on tensors without values
        made.notes.append(
            f"{type(pipe).__name__} does not run without weights, so trajectory and activations are not planned "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        )
        return None


def _measure_in_some_form(
    policy: Policy, mode: FakeTensorMode, inputs: PipelineInputs, row: dict[str, Any], args: DiffusionGRPOConfig
) -> Measurement:
    """Measure a micro-batch in the first form in which the pipeline takes it; see `PipelineInputs.learn`.

    Which form that is cannot be probed as in training: tensors without values do not change.
    """
    given = frozenset(name for name in inputs.accepted & row.keys() if row[name] is not None)
    refusals = []
    for form in (BATCHED, SINGLE, LISTED):
        inputs.forms[given] = Form(form)
        samples = args.per_device_train_batch_size if form == BATCHED else 1
        call = inputs([row] * samples)
        try:
            counted = measure(policy, mode, call, samples, args)
        except Exception as error:  # whatever goes wrong inside the pipeline is an answer to the question
            refusals.append(error)
            continue
        if not args.traits.is_renoised:
            return counted
        unguided = measure(policy, mode, switch_guidance_off(policy.pipe, policy.networks, call), samples, args)
        return measure_renoised(counted, unguided, has_old_policy(args))
    raise refusals[0]


def _find_other_parts(pipe: Any, component: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return [(name, part) for name, part in parts.items() if name not in component]


def _make_autocast(args: DiffusionGRPOConfig) -> contextlib.AbstractContextManager:
    if not (args.bf16 or args.fp16):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16 if args.bf16 else torch.float16)


def count_evaluations(args: DiffusionGRPOConfig, batches: Batches, counted: Measurement | None) -> dict[str, float]:
    """Count forward passes per sample, assuming one in each step if `counted` is None.

    Tokens are drawn by one pass each, and scored by one pass over all of them.
    """
    one, update = (1.0, 1.0) if counted is None else (counted.evaluations, counted.update_evaluations)
    steps, iterations = batches.trained_steps, args.num_iterations
    saved = args.shared_steps * (1 - 1 / (args.branches or 1))  # of the steps that branches share each takes a part
    rollout = one * (batches.num_inference_steps - saved)
    found = {"in one step": one, "rollout": rollout, "update, with gradient": update * steps * iterations}
    if counted is not None and counted.tokens:
        scores = {"scores of the rollout's tokens": 1.0, "update, with gradient": iterations}
        found = {"rollout, one per token": float(counted.tokens), **scores}
    if args.beta > 0 or args.traits.compares:
        found["reference in the update"] = update * steps * iterations
    if has_old_policy(args):
        found["old policy"] = update * steps
    if args.traits.is_renoised and batches.updates_per_rollout > 1:
        found["errors before the first update"] = update * steps
    if args.kl_reward > 0:
        found["policy and reference for kl_reward"] = 2 * one * steps
    if args.importance_sampling_level == "sequence" and batches.updates_per_rollout > 1:
        share = 1 - args.gradient_accumulation_steps / (args.steps_per_generation * iterations)
        found["sequence ratio"] = one * steps * iterations * share
    return found


def has_old_policy(args: DiffusionGRPOConfig) -> bool:
    """Whether the algorithm keeps an old policy."""
    if not args.traits.is_renoised:
        return False
    is_first_replay = args.batch_sizes.updates_per_rollout == 1
    algorithm = load_algorithm(args.loss_type, args.loss_kwargs, is_first_replay=is_first_replay)
    return algorithm.old_decay is not None


def estimate_memory(
    model: nn.Module,
    frozen: int,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    sharding: Sharding,
    counted: Measurement | None,
    batches: Batches,
) -> list[Memory]:
    """Estimate the bytes on one process, by kind.

    Args:
        model: the model as prepared for training, with real or fake tensors.
        frozen: bytes of the pipeline's other parts.
        args, peft_config: settings of the run.
        sharding: how the training state is divided.
        counted: measurement on the pipeline without weights. None leaves out trajectory and activations.
        batches: counts of the run.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    whole, grads, states = (
        _count_bytes(model.parameters()),
        _count_bytes(trained),
        count_optimizer_bytes(trained, args),
    )
    masters = 0
    if sharding.keeps_masters:
        masters = 4 * sum(p.numel() for p in trained)  # whatever the dtype of the weights
        if args.bf16 or args.fp16:
            whole = sum(2 * p.numel() if p.is_floating_point() else p.nbytes for p in model.parameters())
            grads = masters // 2
    engine, away, away_optimizer = sharding.basis, sharding.offload_parameters, sharding.offload_optimizer
    found = [
        _place("parameters", sharding.share(whole, sharding.parameters), away, engine),
        _place("gradients", sharding.share(grads, sharding.gradients), away_optimizer, engine),
        _place("optimizer", sharding.share(states + masters, sharding.optimizer), away_optimizer, engine),
    ]
    if sharding.copies_gradients:
        found.append(Memory("gradient buckets", grads, basis="DDP's copies for the all-reduce"))
    if sharding.parameters and sharding.processes > 1:
        found.append(
            Memory("gathered block", _measure_largest_block(model), basis="the largest block, while it is used")
        )
    found.append(_place("frozen parts", frozen, args.offload_frozen is not None, "text encoders, VAE and the like"))
    if args.needs_reference and peft_config is None:
        found.append(_place("reference", whole, args.offload_ref_model, "a copy of the network"))
    if args.ema_decay is not None:
        found.append(
            Memory("moving average", sharding.share(_count_bytes(trained), sharding.parameters), basis=engine)
        )
    if has_old_policy(args):
        found.append(Memory("old policy", sharding.share(_count_bytes(trained), sharding.parameters), basis=engine))
    if counted is None:
        return found
    trajectory = batches.samples_per_process * (counted.sample_bytes + batches.trained_steps * counted.step_bytes)
    found.append(_place("trajectory", trajectory, args.offload_trajectories, "recorded by the rollout's own code"))
    part = "pass over its tokens" if counted.tokens else "step"
    found.append(Memory("activations", counted.activations, basis=f"what autograd keeps of one micro-batch's {part}"))
    return found


def _place(name: str, count: int, is_on_cpu: bool, basis: str) -> Memory:
    return Memory(name, 0 if is_on_cpu else count, count if is_on_cpu else 0, basis)


def _measure_largest_block(model: nn.Module) -> int:
    """Return the bytes of the largest repeated block of the network."""
    lists = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    return max((_count_bytes(block.parameters()) for block in lists), default=0)


def count_optimizer_bytes(trained: list[nn.Parameter], args: DiffusionGRPOConfig) -> int:
    """Count the bytes that the configured optimizer keeps after a step.

    The optimizer's own class takes one step on tensors without values. The 8-bit optimizers of bitsandbytes need a GPU
    for a step, so their bytes are computed here: one per value and a float32 per block of 256.
    """
    name = OptimizerNames(args.optim).value
    if "8bit" in name:
        count = 1 if "lion" in name else 2
        sizes = [p.numel() for p in trained]
        small = sum(4 * size for size in sizes if size < OPTIMIZER_SMALL)
        large = sum(size + 4 * math.ceil(size / OPTIMIZER_BLOCK) for size in sizes if size >= OPTIMIZER_SMALL)
        return count * (small + large)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    copies = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in trained]
    kwargs = {name: value for name, value in kwargs.items() if name != "fused"}  # fused kernels need a device
    optimizer = cls(copies, **kwargs | {"lr": kwargs["lr"] or 0.0})
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    optimizer.step()
    return _count_bytes(
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    )


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors, each tensor once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
