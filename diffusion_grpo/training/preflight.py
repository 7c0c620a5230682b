"""Check the arguments of a trainer, and decide what follows from them, before the weights of a model are loaded."""

import copy
import dataclasses
import importlib.util
import logging
import os
import sys
from typing import Any

from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import PeftConfig
from torch import Tensor

from ..algorithms.batch import Rows
from ..config.fields import check_fields
from ..config.files import check_hub_access, check_model_name, check_resume_folder
from ..config.sampling import SamplingSettings
from ..config.settings import DiffusionGRPOConfig, describe
from ..config.update import UpdateSettings
from ..config.validate import check_conflicts
from ..data.columns import list_given, list_types
from ..data.inputs import PipelineInputs, prepare_inputs
from ..data.prompts import check_dataset, name_datasets
from ..data.sampler import check_accelerator_config
from ..distributed import refusals
from ..distributed.backend import DistributedBackend
from ..distributed.choose import choose_backend
from ..distributed.zero import read_config_again
from ..policy.modular import as_pipeline
from ..policy.prompt_cache import check_encode_prompt
from ..report.record import describe_script, find_license, make_record
from ..report.run_folder import LIMITS
from ..rewards import (
    Reward,
    check_columns,
    check_eval_rewards,
    check_gradients,
    check_groups,
    check_needs,
    differentiate,
    load_rewards,
    reward_weights,
)
from ..tiny import default_settings
from ..weights.lora import continues_lora
from ..weights.public_names import strip_folders, strip_secrets
from ..weights.quantization import QuantizedLoading, list_trained_methods
from .model import check_gradient_range, check_reentrant, name_model, name_networks, plan_quantization
from .model_checks import check_given_parts, check_named_model, check_peft_config, check_trained_networks
from .model_index import find_networks, pipeline_class
from .modular_loading import check_components
from .trackers import check_trackers

logger = logging.getLogger(__name__)
# settings that a trainer reads only when it is made
READ_ONCE = {field.name for part in (SamplingSettings, UpdateSettings) for field in dataclasses.fields(part)}
READ_ONCE |= {"per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "shuffle_dataset"}
READ_ONCE -= {"num_generations_eval", "eval_num_inference_steps"}
# cheap rewards, watched because a fall of one says that a trained reward may be being hacked
CHEAP = {"images": ["brightness", "sharpness", "colorfulness", "jpeg_compressibility"]}
CHEAP["videos"] = [*CHEAP["images"], "flicker", "motion"]
LORA_LEARNING_RATE, FULL_LEARNING_RATE = 3e-4, 1e-5  # for lr: auto of a DeepSpeed configuration
LARGEST_LEARNING_RATE, TARGET_CHANGE = 0.01, 0.25  # the former with target_change, which scales it down


@dataclasses.dataclass(frozen=True)
class RunRewards:
    trained: list[Reward]
    weights: list[float]
    evaluated: list[Reward]

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self.trained]

    @property
    def all(self) -> list[Reward]:
        return self.trained + self.evaluated

    def differentiate(self, pixels: Tensor, rows: Rows) -> Tensor:
        """Return the (batch,) weighted sum of the trained rewards, with the gradient of the pixels."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return differentiate(self.trained, self.weights, pixels, columns.pop("prompt", None), columns)


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """A run whose settings passed all checks, before its model is loaded."""

    model: str | DiffusionPipeline
    args: DiffusionGRPOConfig
    rewards: RunRewards
    backend: DistributedBackend
    is_full_training: bool
    record: dict[str, Any]
    datasets: list[tuple[str, Dataset]]
    inputs: PipelineInputs | None
    quantized: QuantizedLoading | None

    def prepare_inputs(self, pipeline: type[DiffusionPipeline]) -> PipelineInputs:
        """Return the inputs of the pipeline's calls, after checking them if that had to wait for the pipeline."""
        return self.inputs or prepare_inputs(pipeline, self.args, self.datasets, self.rewards.all)


def check_run(
    model: str | DiffusionPipeline,
    reward_funcs: Any,
    eval_reward_funcs: Any,
    args: DiffusionGRPOConfig | None,
    train_dataset: Dataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
    peft_config: PeftConfig | None,
    has_optimizer: bool = False,
) -> CheckedRun:
    """Refuse early what cannot work, and decide what must be known before the model is loaded."""
    model = as_pipeline(model)
    args = prepare_args(model, args)
    set_log_level(args)
    if isinstance(model, str):
        check_model_name(model)
        model = os.path.expanduser(model)
        if args.push_to_hub and args.process_index == 0:  # a given pipeline is loaded already
            check_hub_access(args.hub_token)
    check_resume_folder(args.resume_from_checkpoint)
    if args.world_size > 1 and args.device.type == "cpu" and "use_cpu" not in args.given and args.should_log:
        logger.warning("There is no GPU here, so the %d processes share the CPU.", args.world_size)
    check_trackers(args.report_to, args.process_index == 0)
    check_given_parts(model, args, name_networks(args))
    check_gradient_range(model, args)
    rewards = load_run_rewards(reward_funcs, eval_reward_funcs, args)
    is_full_training = prepare_training(args, peft_config, has_optimizer)
    check_datasets(rewards, args, train_dataset, eval_dataset)
    if args.takes_gradients and args.stop_when is None:
        guard_gradients(rewards, args, eval_dataset)
    check_accelerator_config(args.accelerator_config)
    backend = choose_backend(args)
    optimizer = getattr(args.optim, "value", args.optim)
    refusals.check_optimizer(backend.sharding, optimizer)
    check_optimizer_package(optimizer)
    if args.group_offload is not None:
        refusals.check_group_offload(backend.sharding, is_full_training)
    datasets = name_datasets(train_dataset, eval_dataset)
    pipeline = pipeline_class(model, args)
    check_named_model(model, pipeline, args)
    if pipeline is not None:
        check_trained_networks(find_networks(model, args), pipeline, args, backend)
    watched = check_watched(args, rewards.all, eval_dataset)
    if args.cache_prompt_embeds != "off" and pipeline is not None:
        check_encode_prompt(pipeline)
    quantized = plan_quantization(model, args, is_full_training)
    refusals.check_quantization(backend.sharding, list_trained_methods(model, args.train_component, quantized))
    inputs = None if pipeline is None else prepare_inputs(pipeline, args, datasets, rewards.all + watched)
    record = describe_run(model, args, peft_config, rewards)
    return CheckedRun(model, args, rewards, backend, is_full_training, record, datasets, inputs, quantized)


def prepare_args(model: str | DiffusionPipeline, args: DiffusionGRPOConfig | None) -> DiffusionGRPOConfig:
    """Return the settings of a run: a copy of the given ones, or the defaults, with the tiny model's own defaults."""
    check_components(model)
    if not isinstance(model, (str, DiffusionPipeline)):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a Hub id, a folder, 'tiny', a DiffusionPipeline or a "
            "ModularPipeline, which holds the network to train."
        )
    if args is not None and not isinstance(args, DiffusionGRPOConfig):
        raise TypeError(f"args is a {type(args).__name__}; pass a DiffusionGRPOConfig, with the same setting names.")
    if args is None:
        args = DiffusionGRPOConfig(f"{name_model(model).split('/')[-1]}-GRPO")
    args = copy.copy(args)  # the user may use the same settings for another run
    args.output_dir = os.path.abspath(args.output_dir)  # a reward may change the working directory
    if args.prompt_embeds_dir is not None:
        args.prompt_embeds_dir = os.path.abspath(os.path.expanduser(args.prompt_embeds_dir))
    if model == "tiny":
        args.fill(default_settings({name: getattr(args, name) for name in args.given}))
    check_fields(args)  # settings may have been changed since they were created
    check_conflicts(args)
    return args


def set_log_level(args: DiffusionGRPOConfig) -> None:
    """Show this library's lines from the level that `log_level` names, as transformers does with its own."""
    if args.log_level == "passive":
        return
    ours = logging.getLogger(__name__.partition(".")[0])
    ours.setLevel(args.get_process_log_level())
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        ours.addHandler(handler)


def note_settings(args: DiffusionGRPOConfig) -> dict[str, Any]:
    """Return the settings that a trainer reads only when it is made."""
    return {name: describe(getattr(args, name)) for name in sorted(READ_ONCE)}


def refuse_changed_settings(noted: dict[str, Any], args: DiffusionGRPOConfig) -> None:
    """Refuse settings that were changed since they were read: some would have no effect, others would split groups."""
    for name, value in note_settings(args).items():
        if value != noted[name]:
            raise ValueError(
                f"{name} was changed from {noted[name]!r} to {value!r} after the trainer was created, which has "
                "read it; create a new one."
            )


def prepare_training(args: DiffusionGRPOConfig, peft_config: PeftConfig | None, has_optimizer: bool = False) -> bool:
    """Check what is to be trained, and fill in the learning rate if the settings give none."""
    check_peft_config(peft_config)
    continues = continues_lora(args.lora_path, args.lora_adapter, peft_config)  # refuses a peft_config with a LoRA
    is_full_training = peft_config is None and not continues
    check_reentrant(args, is_full_training)
    if args.learning_rate is None:
        plugin = args.deepspeed_plugin
        has_optimizer |= plugin is not None and "optimizer" in plugin.hf_ds_config.config
        if args.target_change is None and not has_optimizer:  # which has a rate of its own
            args.target_change = TARGET_CHANGE
        usual = FULL_LEARNING_RATE if is_full_training else LORA_LEARNING_RATE
        args.learning_rate = usual if args.target_change is None else LARGEST_LEARNING_RATE
        read_config_again(args)
    return is_full_training


def load_run_rewards(reward_funcs: Any, eval_reward_funcs: Any, args: DiffusionGRPOConfig) -> RunRewards:
    """Load the rewards from any form that a user may write, and check their requirements."""
    trained = load_rewards(reward_funcs)
    evaluated = load_rewards(eval_reward_funcs, "eval_reward_funcs")
    check_eval_rewards(trained, evaluated)
    names = {reward.name for reward in trained}
    evaluated = [reward for reward in evaluated if reward.name not in names]  # trained rewards are measured anyway
    check_needs([*trained, *evaluated])
    for reward in [*trained, *evaluated] if args.offload_rewards is not None else []:
        reward.offload()
    weights = reward_weights(trained, args.reward_weights)
    if args.takes_gradients:
        check_gradients(trained, weights)
    check_groups(trained, args.batch_sizes.consecutive_samples, args.num_generations)
    return RunRewards(trained, weights, evaluated)


def guard_gradients(
    rewards: RunRewards, args: DiffusionGRPOConfig, eval_dataset: Dataset | dict[str, Dataset] | None
) -> None:
    """Set limits for a run that would hack its rewards soon: of other rewards, or else of the diversity."""
    # one prompt has no standard error, and names of several datasets are part of the metrics' names
    evaluates = args.eval_strategy != "no" and isinstance(eval_dataset, Dataset) and len(eval_dataset) > 1
    limits = {f"eval_rewards/{reward.name}/mean": 3.0 for reward in rewards.evaluated if evaluates}
    alike = {"eval_diversity": evaluates and args.num_generations_eval > 1, "diversity": args.num_generations > 1}
    limits = limits or {name: LIMITS["diversity"] for name, is_measured in alike.items() if is_measured}
    if not limits and args.should_log:
        logger.warning(
            "loss_type='draft' soon finds what raises a reward and nothing else, and this run measures nothing that "
            "could stop it; set eval_dataset, eval_strategy, and eval_reward_funcs to a reward of another kind."
        )
    args.stop_when = limits
    if not limits and "load_best_model_at_end" not in args.given:  # the best was to be within limits
        args.load_best_model_at_end = False


def check_datasets(
    rewards: RunRewards,
    args: DiffusionGRPOConfig,
    train_dataset: Dataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
) -> None:
    """Refuse datasets without prompts, or without a column that a reward asks for."""
    for name, dataset in name_datasets(train_dataset, eval_dataset):
        check_dataset(dataset, name)
        evaluated = rewards.evaluated if name != "train_dataset" else []
        check_columns(rewards.trained + evaluated, list_given(dataset), name, list_types(dataset))
    if rewards.evaluated and not eval_dataset:
        raise ValueError(
            f"eval_reward_funcs={rewards.evaluated[0].name} has no prompts to be measured on; pass an eval_dataset."
        )
    if (args.eval_strategy != "no" or args.eval_on_start) and not eval_dataset:
        raise ValueError(
            "eval_strategy or eval_on_start is set, and there is nothing to evaluate; pass an eval_dataset."
        )


def load_watched_rewards(names: list[str] | None, kind: str | None, others: list[Reward]) -> list[Reward]:
    """Load the rewards to watch, except those that are measured anyway."""
    wanted = [each for name in names or [] for each in (CHEAP.get(kind, []) if name == "auto" else [name])]
    measured = {reward.name for reward in others}
    return [reward for reward in load_rewards(list(dict.fromkeys(wanted))) if reward.name not in measured]


def check_watched(
    args: DiffusionGRPOConfig, others: list[Reward], eval_dataset: Dataset | dict[str, Dataset] | None
) -> list[Reward]:
    """Refuse `watch_rewards` that evaluations could not call, and return the rewards that it names."""
    watched = load_watched_rewards(args.watch_rewards, None, others)
    check_needs(watched)
    for name, dataset in name_datasets(None, eval_dataset):
        check_columns(watched, list_given(dataset), name, list_types(dataset))
    return watched


def check_optimizer_package(name: str) -> None:
    """Refuse an optimizer whose package is missing, which transformers would notice once the model is loaded."""
    package = "torchao" if name in refusals.TORCHAO else "bitsandbytes" if name in refusals.BITSANDBYTES else None
    if package is not None and importlib.util.find_spec(package) is None:
        raise ImportError(f"optim={name!r} needs the package {package}: pip install {package}.")


def describe_run(
    model: str | DiffusionPipeline, args: DiffusionGRPOConfig, peft_config: PeftConfig | None, rewards: RunRewards
) -> dict[str, Any]:
    """Return the entries of run.json that are known before the model is loaded."""
    evaluated = [reward.name for reward in rewards.evaluated]
    run = make_record(name_model(model), args, peft_config, rewards.names, evaluated, rewards.weights)
    run["reward_options"] = {reward.name: strip_folders(strip_secrets(reward.options())) for reward in rewards.all}
    run["license"] = find_license(name_model(model))
    run["command"] = describe_script(sys.argv, args.world_size)
    return run
