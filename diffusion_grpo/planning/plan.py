"""What a training will ask for, before anything of it is loaded: settings go in, counts and bytes leave.

A module of its own because nothing here trains. Counts come from the settings' own properties; bytes from the pipeline
built without weights (`weightless.py`), prepared by the code that prepares the real one, and stepped by the real
optimizer's class. What DeepSpeed and FSDP2 then divide follows what those engines document.
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from peft import PeftConfig
from torch import Tensor, nn
from transformers import Trainer
from transformers.training_args import OptimizerNames

from .. import tiny
from ..config.arguments import LaunchArguments, LoraArguments, ScriptArguments
from ..config.parse import parse_train_arguments
from ..config.settings import DiffusionGRPOConfig
from ..data.inputs import PipelineInputs
from ..distributed.launch import check_processes, read_settings
from ..policy.network_gate import NetworkAccess
from ..policy.token import make_policy
from ..run import adapters
from ..training.model import check_peft_config, prepare_model
from .batches import Batches
from .weightless import Measured, configuration_folder, measure, run_on_cpu, weightless_pipeline

if TYPE_CHECKING:
    from datasets import Dataset

OPTIMIZER_BLOCK = 256  # values that share a scale in bitsandbytes' 8-bit states
OPTIMIZER_SMALL = 4096  # smaller tensors keep 32-bit states there


def settings_for(processes: int) -> type[DiffusionGRPOConfig]:
    """Return the settings' class as that many processes with accelerators read it, whatever this machine has."""

    class PlannedConfig(DiffusionGRPOConfig):
        world_size: ClassVar[int] = processes

        def __post_init__(self):
            if self.bf16 is None:
                self.bf16 = not self.fp16 and not self.use_cpu
            # only looked up on this machine, and set on it
            tf32, self.tf32 = self.tf32, None
            super().__post_init__()
            self.tf32 = tf32

        def _validate_args(self) -> None:
            use_cpu, self.use_cpu = self.use_cpu, True  # or bf16 would be refused where the planning machine lacks it
            try:
                super()._validate_args()
            finally:
                self.use_cpu = use_cpu

        def check_machine(self) -> None:
            """The machine of the plan is another one."""

    return PlannedConfig


@dataclass
class Sharding:
    """What of the training's state each process holds only a part of.

    Attributes:
        name: ddp, zero1, zero2, zero3, fsdp2 or one process.
        processes: among which it is divided.
        optimizer, gradients, parameters: whether these are divided.
        offload_optimizer, offload_parameters: whether they lie in CPU memory.
    """

    name: str
    processes: int
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @classmethod
    def of(cls, launch: dict[str, Any]) -> "Sharding":
        """Of what `accelerate launch` is told.

        Raises:
            ValueError: another kind of distribution.
        """
        kind, processes = launch["distributed_type"], launch["num_processes"]
        if kind == "DEEPSPEED":
            given = launch.get("deepspeed_config") or {}
            stage = int(given.get("zero_stage", 2))
            devices = [given.get(f"offload_{what}_device") for what in ("optimizer", "param")]
            optimizer, parameters = (device not in ("none", None) for device in devices)
            shared = (stage >= 1, stage >= 2, stage == 3)
            return cls(f"zero{stage}", processes, *shared, optimizer, parameters and stage == 3)
        if kind == "FSDP":
            away = bool((launch.get("fsdp_config") or {}).get("fsdp_offload_params"))
            return cls("fsdp2", processes, True, True, True, away, away)
        if kind in ("NO", "MULTI_CPU") or str(kind).startswith("MULTI_"):
            return cls("ddp" if processes > 1 else "one process", processes)
        raise ValueError(f"distributed_type {kind} is not planned; use a multi-GPU, DeepSpeed or FSDP configuration.")

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed keeps the weights."""
        return self.name.startswith("zero")

    def share(self, count: int, is_divided: bool) -> int:
        """Bytes on one process."""
        return math.ceil(count / self.processes) if is_divided else count


@dataclass
class Memory:
    """Bytes of one kind on one process, on the accelerator and in CPU memory, and where the number comes from."""

    name: str
    accelerator: int = 0
    cpu: int = 0
    basis: str = ""


@dataclass
class Plan:
    """Counts and bytes of a training.

    Attributes:
        batches: how prompts, samples and updates relate.
        model: what is trained: `pipeline`, `network`, `weights` and `trained` (numbers of parameters); empty where
            the model's configuration is not here.
        evaluations: forward passes of the network, by what they are for; of one sample.
        memory: bytes a process, by kind; empty where the model's configuration is not here.
        notes: sentences about what could not be told.
    """

    batches: Batches
    sharding: Sharding
    model: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Memory:
        """All bytes together."""
        sums = (sum(getattr(item, where) for item in self.memory) for where in ("accelerator", "cpu"))
        return Memory("all of these", *sums)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"total": asdict(self.total)}


def plan(config_file: str | None, overrides: list[str], launch: LaunchArguments | None = None) -> Plan:
    """Plans the training of a YAML file and overrides.

    Args:
        config_file: as for `diffusion-grpo train`.
        overrides: `--key value` words over it.
        launch: what processes are to be started; one by default. What this machine has does not count.

    Raises:
        ValueError: settings that the training would refuse, too.
    """
    told = read_settings(launch or LaunchArguments())
    is_counted = "num_processes" in told
    told.setdefault("num_processes", told["num_machines"])
    check_processes(told)
    sharding = Sharding.of(told)
    script, lora, args = parse_train_arguments(config_file, overrides, settings_for(sharding.processes))
    made = Plan(Batches.of(args, None), sharding)
    if not is_counted and told["distributed_type"] != "NO":
        made.notes.append("num_processes is not given, so one process a machine is planned; add --num_processes N.")
    rows = _rows(script, made.notes)
    made.batches = Batches.of(args, None if rows is None else len(rows))
    try:
        folder = tiny.PATH if script.model == "tiny" else configuration_folder(script.model)
    except OSError as error:
        made.notes.append(
            f"The model {script.model} is not here ({type(error).__name__}), so its memory is not planned; with its "
            "configuration files in a folder: --model FOLDER. One evaluation of the network in a step is assumed; "
            "with guidance it is two in most pipelines."
        )
        made.evaluations = _evaluations(args, made.batches, None)
        return made
    with torch.random.fork_rng(devices=[]):
        _plan_model(made, folder, args, lora, rows)
    return made


def _rows(script: ScriptArguments, notes: list[str]) -> "Dataset | None":
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
    if args.lora_path is not None:  # a new one of its rank is as large
        peft_config, args.lora_path = adapters.read_config(args.lora_path), None
    check_peft_config(peft_config, args.beta or args.kl_reward)
    pipe, mode = weightless_pipeline(folder, args, peft_config is None)
    component, model = prepare_model(pipe, args, peft_config)
    run_on_cpu(pipe, mode)
    counted, is_mixed = None, args.bf16 or args.fp16
    try:
        access = NetworkAccess(forward_context=lambda: _autocast(args), casts_outputs=is_mixed)
        policy = make_policy(pipe, component, sde_type=args.sde_type, sampling=args.token_sampling, access=access)
        inputs = PipelineInputs(pipe, args)
        row = {"prompt": "a photo of a cat"} if rows is None else inputs.rows(rows, [0])[0]
        samples = args.per_device_train_batch_size
        counted = measure(policy, mode, inputs([row] * samples), samples, args)
    except Exception as error:  # whatever a pipeline does with tensors that hold no values
        made.notes.append(
            f"{type(pipe).__name__} does not run without weights, so trajectory and activations are not planned "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        )
    every, trained = list(model.parameters()), [p for p in model.parameters() if p.requires_grad]
    made.model = {
        "pipeline": type(pipe).__name__,
        "network": ", ".join(component),
        "weights": sum(p.numel() for p in every),
        "trained": sum(p.numel() for p in trained),
    }
    made.evaluations = _evaluations(args, made.batches, counted)
    frozen = _bytes(p for _, part in _other_parts(pipe, component) for p in part.parameters())
    made.memory = memory(model, frozen, args, peft_config, made.sharding, counted, made.batches)


def _other_parts(pipe: Any, component: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return [(name, part) for name, part in parts.items() if name not in component]


def _autocast(args: DiffusionGRPOConfig) -> contextlib.AbstractContextManager:
    if not (args.bf16 or args.fp16):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16 if args.bf16 else torch.float16)


def _evaluations(args: DiffusionGRPOConfig, batches: Batches, counted: Measured | None) -> dict[str, float]:
    """Forward passes a sample, in units of the network's evaluations in one step where these are not known."""
    one = 1.0 if counted is None else counted.evaluations
    steps, iterations = batches.trained_steps, args.num_iterations
    found = {"rollout": one * batches.num_inference_steps, "update, with gradient": one * steps * iterations}
    if args.beta > 0:
        found["reference in the update"] = one * steps * iterations
    if args.kl_reward > 0:
        found["policy and reference for kl_reward"] = 2 * one * steps
    if args.importance_sampling_level == "sequence" and batches.updates_per_rollout > 1:
        share = 1 - args.gradient_accumulation_steps / (args.steps_per_generation * iterations)
        found["sequence ratio"] = one * steps * iterations * share
    return {"in one step": one, **found}


def memory(
    model: nn.Module,
    frozen: int,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    sharding: Sharding,
    counted: Measured | None,
    batches: Batches,
) -> list[Memory]:
    """Bytes on one process, by kind.

    Args:
        model: prepared for training, its tensors real or fake.
        frozen: bytes of the pipeline's other parts.
        args, peft_config: of the training.
        sharding: what is divided.
        counted: on the pipeline without weights; None leaves trajectory and activations out.
        batches: of the training.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    whole, grads, states = _bytes(model.parameters()), _bytes(trained), optimizer_bytes(trained, args)
    masters = 0
    if sharding.is_deepspeed:
        masters = 4 * sum(p.numel() for p in trained)  # its optimizer steps float32 copies, whatever the weights are
        if args.bf16 or args.fp16:
            whole = sum(2 * p.numel() if p.is_floating_point() else p.nbytes for p in model.parameters())
            grads = masters // 2
    engine = "as DeepSpeed documents it" if sharding.is_deepspeed else "the code's own tensors"
    engine = "FSDP2 divides each tensor" if sharding.name == "fsdp2" else engine
    away, away_optimizer = sharding.offload_parameters, sharding.offload_optimizer
    found = [
        _placed("parameters", sharding.share(whole, sharding.parameters), away, engine),
        _placed("gradients", sharding.share(grads, sharding.gradients), away_optimizer, engine),
        _placed("optimizer", sharding.share(states + masters, sharding.optimizer), away_optimizer, engine),
    ]
    if sharding.name == "ddp":
        found.append(Memory("gradient buckets", grads, basis="DDP's copies for the all-reduce"))
    if sharding.parameters and sharding.processes > 1:
        found.append(Memory("gathered block", _largest_block(model), basis="the largest block, while it is used"))
    found.append(_placed("frozen parts", frozen, args.offload_frozen is not None, "text encoders, VAE and the like"))
    if args.needs_reference and peft_config is None:
        found.append(_placed("reference", whole, args.offload_ref_model, "a copy of the network"))
    if args.ema_decay is not None:
        found.append(Memory("moving average", sharding.share(_bytes(trained), sharding.parameters), basis=engine))
    if counted is None:
        return found
    trajectory = batches.samples_per_process * (counted.sample_bytes + batches.trained_steps * counted.step_bytes)
    found.append(_placed("trajectory", trajectory, args.offload_trajectories, "recorded by the rollout's own code"))
    found.append(Memory("activations", counted.activations, basis="what autograd keeps of one micro-batch's step"))
    return found


def _placed(name: str, count: int, is_on_cpu: bool, basis: str) -> Memory:
    return Memory(name, 0 if is_on_cpu else count, count if is_on_cpu else 0, basis)


def _largest_block(model: nn.Module) -> int:
    """Bytes of the largest of the blocks that repeat in the network."""
    lists = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    return max((_bytes(block.parameters()) for block in lists), default=0)


def optimizer_bytes(trained: list[nn.Parameter], args: DiffusionGRPOConfig) -> int:
    """Bytes that the optimizer of the settings keeps after a step.

    One step is taken by its own class on tensors without values; of bitsandbytes' 8-bit states, which need a GPU for
    that, the arithmetic is done here: a byte a value and a float32 a block of 256.
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
    kwargs = {name: value for name, value in kwargs.items() if name != "fused"}  # a kernel, which needs a device
    optimizer = cls(copies, **kwargs | {"lr": kwargs["lr"] or 0.0})
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    optimizer.step()
    return _bytes(value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
