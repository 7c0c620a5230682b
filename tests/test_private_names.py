"""Private names of libraries that the package still uses, for want of a public way: each has a canary here.

A new one fails `test_every_private_name_has_a_canary`: use a public name, or add a line that says what breaks.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer

ROOT, TESTS = Path(__file__).parent.parent / "diffusion_grpo", Path(__file__).parent


def has(owner, name):
    """Whether a class or module has a name, or its code uses it (attributes of instances, keys of configurations)."""
    module, _, attribute = owner.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, attribute) if attribute else found
    return hasattr(found, name) or re.search(rf"\b{name}\b", inspect.getsource(found)) is not None


# name: (where it is, what depends on it)
USED = {
    "_subclasses": ("torch", "`plan` builds pipelines of fake tensors"),
    "_python_dispatch": ("torch.utils", "`plan` watches the operations on fake tensors"),
    "_pytree": ("torch.utils", "network outputs of any structure are cast, blanked and searched for tensors"),
    "_last_lr": ("torch.optim.lr_scheduler:LRScheduler", "the first resumed update logs its own learning rate"),
    "_cdata": ("torch:UntypedStorage", "`plan` tells storages without memory apart"),
    "_parameters": ("torch.nn:Module", "FSDP's and ZeRO's sharded parameters are replaced for a while"),
    "_forward_hooks": ("torch.nn:Module", "hooks of wrapped networks are skipped in blank calls"),
    "_forward_pre_hooks": ("torch.nn:Module", "hooks of wrapped networks are skipped in blank calls"),
    "_load_state_dict_post_hooks": ("torch.nn:Module", "FSDP looks for its shards after a load"),
    "_load_pretrained_model": ("diffusers:ModelMixin", "networks that will be sharded keep the dtype of their files"),
    "_keep_in_fp32_modules": ("diffusers:ModelMixin", "`plan` knows which layers stay in float32"),
    "_keep_in_fp32_modules_strict": ("transformers:PreTrainedModel", "`plan` knows which layers stay in float32"),
    "_supports_gradient_checkpointing": ("diffusers:ModelMixin", "networks that cannot checkpoint are refused"),
    "_repeated_blocks": ("diffusers:ModelMixin", "blocks are found to compile and to shard"),
    "_no_split_modules": ("diffusers:ModelMixin", "blocks are found to compile and to shard"),
    "_cp_plan": ("diffusers:ModelMixin", "networks without context parallelism are refused"),
    "_supports_group_offloading": ("diffusers:ModelMixin", "networks whose blocks cannot be swapped are refused"),
    "_diffusers_hook": ("diffusers.hooks:HookRegistry", "the groups that diffusers offloads are found"),
    "_execution_engine": ("torch.autograd:Variable", "swapped blocks leave when a backward pass ends"),
    "_set_params_and_buffers_to_ignore_for_model": (
        "torch.nn.parallel:DistributedDataParallel",
        "DDP passes over frozen weights in CPU memory and over quantised ones",
    ),
    "_dynamo": ("torch", "compiled blocks have as many graphs as they need"),
    "_execution_device": ("diffusers:DiffusionPipeline", "seeds are drawn on the device that the pipeline uses"),
    "_blocks": ("diffusers:ModularPipeline", "blocks of modular pipelines are called with gradients"),
    "_component_specs": ("diffusers:ModularPipeline", "components are loaded from the revision of a run"),
    "_pretrained_model_name_or_path": ("diffusers:ModularPipeline", "run.json and the card name the base model"),
    "_resolve_quant_config": (
        "diffusers:PipelineQuantizationConfig",
        "modular pipelines are quantised as classic ones",
    ),
    "_exclude_from_cpu_offload": ("diffusers:DiffusionPipeline", "offload_frozen leaves these parts in place"),
    "_backends": ("transformers.utils.import_utils", "processors that lack torchvision are refused early"),
    "_indices": ("datasets:Dataset", "prompts of a shuffled dataset are read many at a time"),
    "_hf_hook": ("accelerate.hooks", "a text encoder that comes back is moved as offload_frozen moved the one before"),
    "_cached_decode_position_ids": (
        "transformers.models.glm_image.modeling_glm_image:GlmImageModel",
        "GLM-Image's tokens are scored at the positions they were drawn at",
    ),
    "_set_sync_gradients": ("accelerate.state:GradientState", "gradients are reduced in the last pass only"),
    "_shared_state": ("accelerate:PartialState", "FSDP2 runs on CPUs"),
    "_hf_deepspeed_config_weak_ref": (
        "transformers.integrations.deepspeed",
        "reward models load whole while the policy is sharded",
    ),
    "_in_forward": ("deepspeed.runtime.zero.parameter_offload:ZeROOrderedDict", "blank calls gather nothing"),
    "_wandb": ("transformers.integrations:WandbCallback", "images and videos are sent to wandb"),
    "_ml_flow": ("transformers.integrations:MLflowCallback", "images and videos are sent to mlflow"),
    "_trackio": ("transformers.integrations:TrackioCallback", "images and videos are sent to trackio"),
    "_progress_bar_config": (
        "diffusers:DiffusionPipeline",
        "rollouts show no bar, and the user's own setting returns",
    ),
    "_threshold_sample": ("diffusers:DDIMScheduler", "thresholded schedulers are followed"),
    "_alpha_cumprod": ("diffusers:DDPMWuerstchenScheduler", "Stable Cascade's steps follow its schedule"),
    "_use_default_values": ("diffusers:ConfigMixin", "settings left at their defaults pass to another scheduler"),
    "_active_adapter": ("peft.tuners.tuners_utils:BaseTunerLayer", "the reference runs with the loaded LoRAs alone"),
    "_internal_dict": ("diffusers:ConfigMixin", "a quantised network is saved with a config of plain weights"),
    "_hf_peft_config_loaded": ("diffusers.loaders:PeftAdapterMixin", "merged weights are saved without adapters"),
    "_get_default_store": ("torch.distributed.distributed_c10d", "processes learn of each other's failures"),
}
# methods of transformers' Trainer and TrainingArguments that are overridden or called
TRAINER = """
_build_accelerator_args _prepare_for_training _save_checkpoint _save_optimizer_and_scheduler _load_from_checkpoint
_load_best_model _load_optimizer_and_scheduler _load_rng_state _load_scaler _push_from_checkpoint _run_epoch
_get_train_sampler _get_grad_norm _finish_current_push _get_dataloader _get_output_dir _save_rng_state _save_scaler
_evaluate _prepare_inputs _save _get_learning_rate
""".split()
ARGUMENTS = ["_VALID_DICT_FIELDS", "_validate_args"]
# keys, endings and values that are only written like private names
WORDS = """
_class_name _column _grid_thw _lora_layers _lora_adapter_metadata _metadata _model_ _model_dir _name_or_path
_native_cudnn _replace _reward _reward_std_error _runtime _std _std_error _exit _pipe
""".split()


def private_names():
    """Private names in the package's code that it does not define itself, and Trainer's methods that it overrides."""
    used, defined = set(), set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
            elif isinstance(node, ast.ImportFrom):
                used |= {
                    part for name in [node.module or "", *(a.name for a in node.names)] for part in name.split(".")
                }
    return {name for name in used - defined if re.fullmatch(r"_[a-z]\w*", name)}


def test_every_private_name_has_a_canary():
    assert private_names() <= {*USED, *TRAINER, *WORDS}
    owned = {name for cls in (DiffusionGRPOTrainer, *DiffusionGRPOTrainer.__mro__) for name in own_private(cls)}
    assert {name for name in owned if hasattr(Trainer, name)} <= {*TRAINER}
    assert {name for name in own_private(DiffusionGRPOConfig) if hasattr(TrainingArguments, name)} <= {*ARGUMENTS}


def own_private(cls):
    """The private names that a class of this package sets."""
    ours = cls.__module__.startswith("diffusion_grpo.")
    return [name for name in vars(cls) if name.startswith("_") and not name.startswith("__")] if ours else []


@pytest.mark.parametrize("name", USED)
def test_a_private_name_is_still_there(name):
    owner, breaks = USED[name]
    assert has(owner, name), f"{owner} has no {name} any more, on which it depends that {breaks}"


@pytest.mark.parametrize(
    ("owner", "name"), [(Trainer, n) for n in TRAINER] + [(TrainingArguments, n) for n in ARGUMENTS]
)
def test_transformers_still_calls_what_is_overridden(owner, name):
    assert hasattr(owner, name), f"transformers.{owner.__name__} has no {name} any more; what overrides it never runs"


def find_private_uses(path, ours):
    """The package's private names that a test file imports, reads, or names in text, by which they are patched."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    own |= {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in stored}
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffusion_grpo"):
            yield from (alias.name for alias in node.names if re.fullmatch(r"_[a-zA-Z]\w*", alias.name))
        elif isinstance(node, ast.Attribute) and node.attr in ours - own:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            parts = node.value.split(".") if re.fullmatch(r"[\w.]+", node.value) else []
            yield from (part for part in parts if part in ours - own)


def test_no_test_reaches_into_private_names_of_the_package():
    ours = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                ours.add(node.id if isinstance(node, ast.Name) else node.attr)
    ours = {name for name in ours if re.fullmatch(r"_[a-zA-Z]\w*", name)} - {*USED, *TRAINER, *ARGUMENTS, *WORDS}
    ours -= {"_step_index"}  # of diffusers' schedulers
    found = {path.relative_to(TESTS): set(find_private_uses(path, ours)) for path in TESTS.rglob("*.py")}
    wrong = [f"{path}: {', '.join(sorted(names))}" for path, names in sorted(found.items()) if names]
    assert not wrong, "give the package a public way, or test through its behaviour:\n" + "\n".join(wrong)
