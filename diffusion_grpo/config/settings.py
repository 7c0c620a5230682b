"""`DiffusionGRPOConfig`: all settings of a training run, under TRL's names where TRL has one.

Settings that cannot work are refused here in one sentence, before any model is loaded. Most fields are in
`sampling.py`, `update.py` and `run.py`; what follows from them is in `defaults.py`. What the machine and the launcher
ask for, such as a precision, is read here, and values are described as JSON.
"""

import dataclasses
import functools
import json
import logging
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import SchedulerType, TrainingArguments

from ..algorithms.advantages import load_advantage_fn
from ..algorithms.registry import check_loss_kwargs, check_run_settings
from .declare import Count, NotNegative, setting
from .defaults import Sizes
from .fields import DICTIONARIES, check_fields, read_dictionaries
from .files import expand_home, read_text
from .names import apply_trl_names, explain_unknown
from .quantization import QuantizationSettings
from .run import RunSettings
from .sampling import SamplingSettings
from .update import UpdateSettings
from .validate import WATCHING_SCHEDULES, check_conflicts

logger = logging.getLogger(__name__)
LAUNCHED_PRECISION = "ACCELERATE_MIXED_PRECISION"  # environment variable that `accelerate launch` sets
# settings that an algorithm may take, by the keyword argument of its constructor
OF_ALGORITHMS = {name: name for name in ("beta", "epsilon", "epsilon_high", "max_ratio_error")}
OF_ALGORITHMS |= {"anchor": "old_log_prob", "reward_weights": "multi_objective_aggregation"}


def has_apple_gpu() -> bool:
    """Return whether the accelerator is Apple's (MPS), which has no float64: ratios and losses are computed in it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "mps"


@dataclass
class DiffusionGRPOConfig(
    Sizes, RunSettings, QuantizationSettings, UpdateSettings, SamplingSettings, TrainingArguments
):
    r"""Settings of [`DiffusionGRPOTrainer`], in addition to [`~transformers.TrainingArguments`].

    The fields that this library adds are in the base classes, one theme each; fields that only change a default are in
    the class body. Each field is described in its `help`. By default one early step of each rollout is trained, and
    the samples of a prompt share their initial latent (docs/algorithms/fast.md); the rest is Flow-GRPO's recipe for
    LoRA on SD3.5-M (https://huggingface.co/papers/2505.05470) with smaller batches. No large model has been trained
    with these defaults yet.

    Raises:
        ValueError: a setting is out of range, unknown, or contradicts another one.
        TypeError: a name is not a setting; the message names the nearest one.

    Examples:
        >>> settings = DiffusionGRPOConfig(folder, num_generations=8, per_device_train_batch_size=8, max_steps=10)
        >>> settings.learning_rate is None  # it regulates itself
        True
        >>> DiffusionGRPOConfig(folder, num_generation=8)
        Traceback (most recent call last):
        TypeError: ...
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, *DICTIONARIES]

    # TrainingArguments with other defaults or descriptions
    max_steps: int = setting(-1, "Number of updates. -1 makes as many as num_train_epochs needs.")
    learning_rate: NotNegative | None = setting(
        None, "Learning rate; by default, target_change finds it. With target_change, its upper limit."
    )
    lr_scheduler_type: str = setting(
        "constant",
        "Learning rate schedule; any of transformers' schedules. With warmup_steps, constant becomes "
        "constant_with_warmup.",
    )
    weight_decay: float = setting(1e-4, "Weight decay of AdamW.")
    per_device_train_batch_size: Count = setting(
        4,
        "Number of samples in one forward and backward pass; also the batch size of rollouts unless "
        "rollout_batch_size is set.",
    )
    per_device_eval_batch_size: Count | None = setting(
        None, "Number of samples generated together in evaluations; by default as in rollouts."
    )
    gradient_accumulation_steps: Count = setting(32, "Number of micro-batches in one optimizer update.")
    activation_checkpointing: bool | None = setting(
        True,
        "Recompute activations in the backward pass: less memory, more time. gradient_checkpointing is another name.",
    )
    bf16: bool | None = setting(
        None,
        "Train in mixed bfloat16 precision. By default on if the GPU supports it natively; on older GPUs, set fp16.",
    )
    logging_steps: float = setting(1, "Log every N updates.")
    save_steps: float = setting(50, "Write a checkpoint every N updates.")
    eval_steps: float | None = setting(
        None,
        "Evaluate every N updates; below 1, a fraction of the run. By default logging_steps if that is set, "
        "otherwise save_steps.",
    )
    eval_on_start: bool | None = setting(
        None, "Also evaluate before the first update. By default on wherever eval_strategy is set."
    )
    ddp_find_unused_parameters: bool | None = setting(
        False, "Let DDP search for unused parameters, of which a policy has none."
    )
    ddp_broadcast_buffers: bool | None = setting(False, "Let DDP broadcast buffers in each update.")
    dataloader_pin_memory: bool = setting(False, "Pin batches in memory; they contain only prompts.")
    hub_token: str | None = setting(
        None,
        "Token of the Hub. By default that of `hf auth login`, or HF_TOKEN.",
        repr=False,  # it is secret
    )
    remove_unused_columns: bool | None = setting(
        False, "Must stay False: every column is passed to the reward functions."
    )

    def __post_init__(self):
        if "given" not in vars(self):  # a dataclass that inherits from this one has an __init__ of its own
            self.given = find_changed(self)
        vars(self).update(expand_home(vars(self)))
        apply_trl_names(self)
        read_dictionaries(self)
        check_fields(self)
        self.fill_in()
        if self.max_steps == 0:  # transformers would run all epochs
            self.num_train_epochs = 0.0
        if count_launched_processes() > 1 and not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise each process would be a run of its own
        if not self.use_cpu and has_apple_gpu():
            logger.warning("Apple's GPU has no float64, which training needs; the run uses the CPU.")
            self.use_cpu = True
        self.choose_precision()
        watches = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)) in WATCHING_SCHEDULES
        asks_for_best = watches or self.load_best_model_at_end or self.save_strategy == "best"
        if self.metric_for_best_model is None and asks_for_best:
            self.metric_for_best_model = "eval_reward"  # there is no eval_loss here
        if self.eval_on_start is None:  # a result says little without the one before training
            self.eval_on_start = self.eval_strategy != "no"
        # accelerate would compile the whole network; `training/model.py` compiles its repeated blocks instead
        compiles = bool(self.torch_compile or self.torch_compile_backend or self.torch_compile_mode)
        backend, mode = self.torch_compile_backend or ("inductor" if compiles else None), self.torch_compile_mode
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = False, None, None
        if not self.use_cpu and self.ddp_backend is None and offloads_shards(self):
            self.ddp_backend = find_backends_with_cpu()
        super().__post_init__()
        if not (self.bf16 or self.fp16):
            self.mixed_precision = "no"  # transformers would take that of `accelerate launch`
        self.gradient_checkpointing = None  # or a copy would keep it and ignore another activation_checkpointing
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = compiles, backend, mode
        if watches:
            better = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": better, **(self.lr_scheduler_kwargs or {})}
        if self.warmup_steps and self.lr_scheduler_type == SchedulerType.CONSTANT:  # which would drop the warm-up
            self.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        check_conflicts(self)
        self.check_machine()
        check_loss_kwargs(self.loss_type, self.loss_kwargs, self.anchor)  # imports a loss of the user's own
        check_run_settings(self.loss_type, list_algorithm_settings(self))
        load_advantage_fn(self.advantage_fn)

    def __str__(self) -> str:
        return repr(self)  # that of transformers shows every field

    def choose_precision(self) -> None:
        """Fill in the precision that neither the user nor the launcher has set, by the GPU."""
        launched = os.environ.get(LAUNCHED_PRECISION)
        if launched in ("bf16", "fp16") and self.bf16 is None and not self.fp16 and "fp16" not in self.given:
            setattr(self, launched, launched == "bf16" or not self.use_cpu)  # fp16 does nothing on a CPU
        if self.bf16 is not None:
            return
        has_gpu = not self.use_cpu and torch.cuda.is_available()  # older ones emulate bfloat16, slowly
        self.bf16 = not self.fp16 and has_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        if has_gpu and not (self.bf16 or self.fp16):
            logger.warning(
                "This GPU does not compute in bfloat16, so the run uses float32, which needs twice the memory; "
                "fp16=True trains in half precision."
            )

    def check_machine(self) -> None:
        """Refuse settings that would silently have no effect on this machine."""
        if self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            raise ValueError(
                "fp16=True needs a GPU: a CPU would train in float32; set fp16=False (bf16=True works there)."
            )

    def fill(self, defaults: dict[str, Any]) -> None:
        """Set defaults for settings that were not given, before anything has used them."""
        for name, value in defaults.items():
            if name not in self.given:
                setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """As `TrainingArguments.to_dict`, but replace tensors and images among the settings by their type and size."""
        return {name: describe(value) for name, value in super().to_dict().items()}


def list_algorithm_settings(settings: DiffusionGRPOConfig) -> dict[str, str]:
    """Return the settings of the algorithm that differ from their defaults, as text, by its keyword argument."""
    changed = find_changed(settings)
    if settings.multi_objective_aggregation != "loss_per_reward":  # others only change the advantages
        changed -= {"multi_objective_aggregation"}
    return {
        keyword: f"{name}={getattr(settings, name)!r}" for keyword, name in OF_ALGORITHMS.items() if name in changed
    }


def find_changed(settings: DiffusionGRPOConfig) -> frozenset[str]:
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(settings)
    }
    return frozenset(name for name, default in defaults.items() if getattr(settings, name) != default)


def count_launched_processes() -> int:
    """Return how many processes torchrun or accelerate started, including this one; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1


def offloads_shards(args: TrainingArguments) -> bool:
    """Return whether `fsdp` and `fsdp_config`, a dictionary, JSON or a JSON file, keep shards in CPU memory."""
    config = args.fsdp_config if args.fsdp else None
    if isinstance(config, str):
        config = json.loads(config if config.lstrip().startswith("{") else read_text(config))
    names = ("cpu_offload", "fsdp_cpu_offload")
    return "offload" in str(args.fsdp) or any((config or {}).get(name) for name in names)


def find_backends_with_cpu() -> str | None:
    """Return the backends for collectives on the accelerator and on the CPU; None where torch's default has both."""
    # norms of shards in CPU memory are summed there; torchrun, unlike `accelerate launch`, does not add gloo
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {"cuda": "cuda:nccl,cpu:gloo", "xpu": "xpu:xccl,cpu:gloo"}.get(accelerator.type if accelerator else "cpu")


def find_launched_precision(args: DiffusionGRPOConfig) -> dict[str, bool]:
    """Return `{"bf16": True}` or `{"fp16": True}` if `accelerate launch` asked for it and the run uses it."""
    launched = os.environ.get(LAUNCHED_PRECISION)
    return {launched: True} if launched in ("bf16", "fp16") and getattr(args, launched) else {}


def describe(value: Any) -> Any:
    """Convert a setting for JSON: a tensor or an image becomes a text with its type and size."""
    if isinstance(value, dict):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    size = getattr(value, "shape", getattr(value, "size", None))
    return f"{type(value).__name__} {tuple(size)}" if isinstance(size, tuple) else type(value).__name__


def _suggest_names(init):
    """Wrap the constructor: explain names that are no settings, and note those that the user chose."""

    @functools.wraps(init)
    def check_and_init(self, *args, **kwargs):
        known = [field.name for field in dataclasses.fields(DiffusionGRPOConfig) if field.init]
        for name in kwargs:
            if name not in known:
                advice = explain_unknown(name, known) or (
                    "docs/config.md lists those that there are; model, rewards, prompts and LoRA go to the trainer"
                )
                raise TypeError(f"DiffusionGRPOConfig has no setting {name!r}; {advice}")
        if not set(known) <= kwargs.keys():  # parsers and `dataclasses.replace` pass all of them
            self.given = frozenset(kwargs)  # the settings that the user chose
        init(self, *args, **kwargs)

    return check_and_init


DiffusionGRPOConfig.__init__ = _suggest_names(DiffusionGRPOConfig.__init__)  # type: ignore[method-assign]
