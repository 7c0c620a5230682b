"""Private names of libraries that the package still uses, for want of a public way: each has a canary here.

A new one fails `test_every_private_name_has_a_canary`: use a public name, or add it to `USED`.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer

ROOT = Path(__file__).parent.parent / "diffusion_grpo"
PRIVATE = re.compile(r"_[a-z]\w*")
USED = {  # class or module: what is used of it
    "torch": "_subclasses _dynamo",
    "torch.utils": "_python_dispatch _pytree",
    "torch.optim.lr_scheduler:LRScheduler": "_last_lr",
    "torch:UntypedStorage": "_cdata",
    "torch.nn:Module": "_parameters _forward_hooks _forward_pre_hooks _load_state_dict_post_hooks",
    "torch.autograd:Variable": "_execution_engine",
    "torch.nn.parallel:DistributedDataParallel": "_set_params_and_buffers_to_ignore_for_model",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "diffusers:ModelMixin": "_load_pretrained_model _keep_in_fp32_modules _supports_gradient_checkpointing "
    "_repeated_blocks _no_split_modules _cp_plan _supports_group_offloading",
    "diffusers:DiffusionPipeline": "_execution_device _exclude_from_cpu_offload _progress_bar_config",
    "diffusers:ModularPipeline": "_blocks _component_specs _pretrained_model_name_or_path",
    "diffusers:PipelineQuantizationConfig": "_resolve_quant_config",
    "diffusers:ConfigMixin": "_use_default_values _internal_dict",
    "diffusers:DDIMScheduler": "_threshold_sample",
    "diffusers:DDPMWuerstchenScheduler": "_alpha_cumprod",
    "diffusers.hooks:HookRegistry": "_diffusers_hook",
    "diffusers.loaders:PeftAdapterMixin": "_hf_peft_config_loaded",
    "transformers:PreTrainedModel": "_keep_in_fp32_modules_strict",
    "transformers.utils.import_utils": "_backends",
    "transformers.models.glm_image.modeling_glm_image:GlmImageModel": "_cached_decode_position_ids",
    "transformers.integrations.deepspeed": "_hf_deepspeed_config_weak_ref",
    "transformers.integrations:WandbCallback": "_wandb",
    "transformers.integrations:MLflowCallback": "_ml_flow",
    "transformers.integrations:TrackioCallback": "_trackio",
    "datasets:Dataset": "_indices",
    "accelerate.hooks": "_hf_hook",
    "accelerate.state:GradientState": "_set_sync_gradients",
    "accelerate:PartialState": "_shared_state",
    "deepspeed.runtime.zero.parameter_offload:ZeROOrderedDict": "_in_forward",
    "peft.tuners.tuners_utils:BaseTunerLayer": "_active_adapter",
}
# methods of transformers' Trainer and TrainingArguments that are overridden or called
TRAINER = """
_build_accelerator_args _prepare_for_training _save_checkpoint _save_optimizer_and_scheduler _load_from_checkpoint
_load_best_model _load_optimizer_and_scheduler _load_rng_state _load_scaler _push_from_checkpoint _run_epoch
_get_train_sampler _get_grad_norm _finish_current_push _get_dataloader _get_output_dir _save_rng_state _save_scaler
_evaluate _prepare_inputs _save _get_learning_rate _determine_best_metric
""".split()
ARGUMENTS = ["_VALID_DICT_FIELDS", "_validate_args"]
OF_PYTHON = {"_exit", "_replace"}


def walk(path):
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def find_names(path):
    """Return the names that a file defines, and those that it reads, imports, or gives to a call as strings."""
    defined, used = set(), set()
    for node in walk(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {part for name in (node.module or "", *(a.name for a in node.names)) for part in name.split(".")}
        elif isinstance(node, ast.Call):  # of getattr, setattr and the like
            used |= {part.value for part in node.args[1:] if isinstance(getattr(part, "value", None), str)}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("diffusion_grpo."):
            used |= {*node.value.split(".")}
    return [{name for name in names if PRIVATE.fullmatch(name)} for names in (defined, used)]


def find_package_names():
    found = [find_names(path) for path in ROOT.rglob("*.py")]
    return [set().union(*names) for names in zip(*found, strict=True)]


def own_private(cls):
    """The private names that a class of this package sets."""
    ours = cls.__module__.startswith("diffusion_grpo.")
    return [name for name in vars(cls) if name.startswith("_") and not name.startswith("__")] if ours else []


def test_every_private_name_has_a_canary():
    defined, used = find_package_names()
    assert used - defined <= {*" ".join(USED.values()).split(), *TRAINER, *OF_PYTHON}
    owned = {name for cls in DiffusionGRPOTrainer.__mro__ for name in own_private(cls)}
    assert {name for name in owned if hasattr(Trainer, name)} <= {*TRAINER}
    assert {name for name in own_private(DiffusionGRPOConfig) if hasattr(TrainingArguments, name)} <= {*ARGUMENTS}


@pytest.mark.parametrize("owner", USED)
def test_private_names_are_still_there(owner):
    """Defined, or at least in the code of the class or module (attributes of instances, keys of configurations)."""
    module, _, attribute = owner.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, attribute) if attribute else found
    missing = [n for n in USED[owner].split() if not hasattr(found, n)]
    assert all(re.search(rf"\b{name}\b", inspect.getsource(found)) for name in missing), missing


def test_transformers_still_calls_what_is_overridden():
    """What overrides a method that is not there any more never runs."""
    assert not [name for name in TRAINER if not hasattr(Trainer, name)]
    assert not [name for name in ARGUMENTS if not hasattr(TrainingArguments, name)]
