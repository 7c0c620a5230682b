"""The settings by name and annotation, without importing torch: words and JSON become values, which are checked."""

import functools
import inspect
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from .arguments import LaunchArguments, LoraArguments, ScriptArguments
from .declare import Range
from .names import suggest
from .quantization import QuantizationSettings
from .run import RunSettings
from .sampling import SamplingSettings
from .update import UpdateSettings

TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as in transformers' parser
ACCEPTED = {bool: bool, int: numbers.Integral, float: numbers.Real, dict: Mapping, str: str}
# the fields of `TrainingArguments`, whose import takes seconds; a test compares them
OF_TRANSFORMERS = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node
logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name
project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps
save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id
hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed
debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
""".split()
DICTIONARIES = ("pipeline_kwargs", "eval_pipeline_kwargs", "scheduler_kwargs", "model_init_kwargs", "loss_kwargs")
DICTIONARIES += ("quantization", "stop_when")


@dataclass(frozen=True)
class Setting:
    """What the annotation of a field says: its types without None, its words, its range; and its default."""

    kinds: tuple[Any, ...]
    choices: tuple[str, ...]
    range: Range | None
    takes_none: bool
    default: Any

    @classmethod
    def of(cls, hint: Any, default: Any) -> "Setting":
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        ranges = [mark for part in parts if get_origin(part) is Annotated for mark in part.__metadata__]
        choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        kinds = [part.__origin__ if get_origin(part) is Annotated else part for part in parts]
        kinds = [str if get_origin(kind) is Literal else kind for kind in kinds if kind is not NoneType]
        return cls(tuple(kinds), tuple(choices), *ranges or [None], NoneType in parts or default is None, default)

    def describe(self) -> str:
        kinds = [" of ".join(part.__name__ for part in (get_origin(k) or k, *_items(k))) for k in self.kinds]
        return f"one of {', '.join(self.choices)}" if self.choices else " or ".join(kinds)


@functools.lru_cache(maxsize=16)
def list_fields(*classes: type) -> dict[str, Setting]:
    """Return the fields of dataclasses by name; `dataclasses.MISSING` is the default of those that have none."""
    bases = [base for cls in classes for base in reversed(cls.__mro__)]
    # not the fields' own types, which transformers' `HfArgumentParser` replaces
    hints = {name: hint for base in bases for name, hint in inspect.get_annotations(base).items()}
    return {f.name: Setting.of(hints[f.name], f.default) for cls in classes for f in fields(cls) if f.init}


def script_fields() -> dict[str, Setting]:
    """Return the settings that only the command line takes."""
    return list_fields(ScriptArguments, LoraArguments, LaunchArguments)


def own_fields() -> dict[str, Setting]:
    """Return all settings except those that transformers has too."""
    return script_fields() | list_fields(RunSettings, QuantizationSettings, UpdateSettings, SamplingSettings)


def read_value(value: Any, setting: Setting) -> Any:
    """Convert words to the type of a setting, and a single value of a list to a list; what does not fit stays."""
    items = [_items(kind) for kind in setting.kinds if get_origin(kind) is list]
    if items and isinstance(value, list):
        return [_convert(item, items[0]) for item in value]
    if items and str not in setting.kinds and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return [_convert(value, items[0])]
    return _convert(value, setting.kinds)


def _items(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is list else ()


def _convert(value: Any, kinds: tuple[Any, ...]) -> Any:
    word = str(value).lower()
    if kinds == (bool,) and word in (*TRUE, *FALSE):
        return word in TRUE
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    if int in kinds and word.removeprefix("-").isdigit():
        return int(word)
    if kinds == (float,):
        try:
            return float(word)
        except ValueError:
            return value
    return str(value) if kinds == (str,) else value


def read_dictionaries(settings: Any) -> None:
    """Read settings that are dictionaries and were written as JSON."""
    for name in DICTIONARIES:
        text = getattr(settings, name)
        if isinstance(text, str):
            try:
                setattr(settings, name, dict(json.loads(text)))
            except (ValueError, TypeError):
                raise ValueError(f"{name}={text!r} must be a dictionary, written as JSON.") from None


def check_fields(settings: Any) -> None:
    """Refuse values of another type, unknown words and numbers out of range: `"False"` would count as true."""
    for name, setting in list_fields(type(settings)).items():
        value = getattr(settings, name, None)
        if value is None and setting.takes_none:
            continue
        # a single text may be an enumeration; transformers replaces what takes several types by objects of its own
        is_open = setting.kinds == (str,) or len(setting.kinds) > 1 and name in OF_TRANSFORMERS
        is_known = all((get_origin(kind) or kind) in (*ACCEPTED, list) for kind in setting.kinds)
        if is_known and not is_open and not any(_fits(value, kind) for kind in setting.kinds):
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__}, but must be {setting.describe()}.")
        if setting.choices and value not in setting.choices:
            hint = suggest(value, setting.choices)
            raise ValueError(f"{name}={value!r} is unknown; it must be {setting.describe()}.{hint}")
        if setting.range is not None and isinstance(value, numbers.Real) and value not in setting.range:
            raise ValueError(f"{name} must be {setting.range}, got {value}.")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is list:
        inner = _items(kind)[0]
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and (inner not in (int, float) or all(_fits(item, inner) for item in value))
    is_bool = isinstance(value, bool) and origin is not bool
    return isinstance(value, ACCEPTED[origin]) and not is_bool and not (origin is float and math.isnan(value))
