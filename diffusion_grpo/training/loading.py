"""Load the policy of a checked run: load the pipeline, make its network trainable, prepare its inputs."""

import logging
from dataclasses import dataclass

from peft import PeftConfig
from torch import nn
from transformers import set_seed

from ..data.inputs import PipelineInputs
from ..distributed.failure import ProcessGroupMonitor
from ..policy.base import Policy, list_filters
from ..policy.token import make_policy
from ..rewards.contract import takes_only_latents
from .model import load_pipeline, make_lazy_encoders, prepare_model
from .model_checks import check_trained_networks
from .preflight import CheckedRun
from .prompt_embeds import PromptEmbeds, make_prompt_embeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy in CPU memory, before `Trainer` and its engines take it."""

    policy: Policy
    model: nn.Module
    inputs: PipelineInputs
    embeds: PromptEmbeds | None


def load_policy(given: CheckedRun, peft_config: PeftConfig | None, monitor: ProcessGroupMonitor) -> LoadedPolicy:
    """Load the pipeline of a run as a policy; with `cache_prompt_embeds`, also encode this process's prompts."""
    args, backend = given.args, given.backend
    encoders = make_lazy_encoders(given.model, args)
    pipe = load_pipeline(given.model, args, given.is_full_training, backend, given.quantized, encoders)
    set_seed(args.seed)  # a LoRA starts from random weights
    component, model = prepare_model(pipe, args, peft_config, backend)
    inputs = given.prepare_inputs(type(pipe))
    inputs.fit_images(pipe)
    policy = make_policy(
        pipe,
        component,
        sde_type=args.sde_type,
        sampling=args.token_sampling,
        access=backend.network_access(model),
        log_prob_type=args.log_prob_type,
    )
    if given.inputs is None:  # code from elsewhere, which could not be checked before loading
        check_trained_networks(component, type(pipe), args, backend)
    policy.check_noise_level(args.noise_level)
    if any(map(takes_only_latents, given.rewards.all)):
        policy.check_latents()
    if args.should_log and (filters := list_filters(pipe)):
        logger.warning("Samples are made without %s, so that rewards see what the network made.", ", ".join(filters))
    return LoadedPolicy(policy, model, inputs, make_prompt_embeds(args, given, policy, inputs, monitor))
