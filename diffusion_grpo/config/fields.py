"""The settings by name and type, without importing torch or transformers, and how words become values of a type."""

import dataclasses
import inspect
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .arguments import LaunchArguments, LoraArguments, ScriptArguments
from .quantization import QuantizationSettings
from .run import RunSettings
from .sampling import SamplingSettings
from .update import UpdateSettings

TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as in transformers' parser
# Strings that may be true or false: the newest checkpoint, FSDP as in `fsdp_config`, TRL's names of group and none.
TAKE_BOOL = ("resume_from_checkpoint", "fsdp", "scale_rewards")
REWARDS = ("reward_funcs", "eval_reward_funcs")  # names, mappings, or lists of both; `load_rewards` checks them
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


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass: its type as a user would write it (`float | None`), its default, and its choices."""

    type: str
    default: Any
    choices: tuple[str, ...] = ()


def list_fields(*classes: type) -> dict[str, Setting]:
    """Return the fields of dataclasses by name; `dataclasses.MISSING` is the default of those that have none."""
    by_name = {f.name: f.default for cls in classes for f in dataclasses.fields(cls) if f.init}
    bases = [base for cls in classes for base in reversed(cls.__mro__)]
    # not the fields' own types, which transformers' `HfArgumentParser` replaces
    hints = {name: hint for base in bases for name, hint in inspect.get_annotations(base).items()}
    return {
        name: Setting(_type_name(hints[name]), default, _list_choices(hints[name]))
        for name, default in by_name.items()
    }


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_type_name, get_args(hint))))
    if _list_choices(hint):
        return "str"
    return "None" if hint is NoneType else hint.__name__ if isinstance(hint, type) else str(hint)


def _list_choices(hint: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`, which may be in a union."""
    if get_origin(hint) is Literal:
        return tuple(word for word in get_args(hint) if isinstance(word, str))
    return tuple(word for part in get_args(hint) for word in _list_choices(part))


def script_fields() -> dict[str, Setting]:
    """Return the settings that only the command line takes."""
    return list_fields(ScriptArguments, LoraArguments, LaunchArguments)


def own_fields() -> dict[str, Setting]:
    """Return all settings except those that transformers has too."""
    return script_fields() | list_fields(RunSettings, QuantizationSettings, UpdateSettings, SamplingSettings)


def read_value(name: str, value: Any, kind: str) -> Any:
    """Convert a value to its type; raise ValueError if it does not fit."""
    if name in REWARDS and isinstance(value, (dict, list)) and value:
        return value
    kinds = {word.strip() for word in kind.split("|")} - {"None"}
    if isinstance(value, str) and "str" in kinds and kinds & {"int", "list[int]"}:  # such as a number, or "all"
        return int(value) if value.isdigit() else value
    if kind.startswith("list[") and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        value = [value]
    for cls, word in ((type(None), "None"), (bool, "bool"), (list, "list"), (dict, "dict")):
        if isinstance(value, cls) and word not in kind and not (cls is bool and name in TAKE_BOOL):
            raise ValueError(f"`{name}` is {value}, expected one {kind}.")
    if isinstance(value, list):
        kinds = {word for word in kinds if word.startswith("list[")} or kinds
    if isinstance(value, list) and len(kinds) == 1:
        inner = kind.partition("[")[2].partition("]")[0]
        return [_convert(name, item, inner) for item in value]
    if value is None or isinstance(value, (list, dict)) or len(kinds) != 1:
        return value
    return _convert(name, value, *kinds)


def _convert(name: str, value: Any, kind: str) -> Any:
    """Convert a word to an int, a float or a bool, if its type is one of these."""
    if kind == "bool":
        word = str(value).lower()
        if word not in (*TRUE, *FALSE):
            raise ValueError(f"`{name}`: invalid bool value: {value!r}; write true or false.")
        return word in TRUE
    if kind not in ("int", "float"):
        return str(value) if kind == "str" and not isinstance(value, bool) else value
    try:
        return int(str(value)) if kind == "int" else float(str(value))
    except ValueError as error:
        raise ValueError(f"`{name}`: invalid {kind} value: {str(value)!r}.") from error
