"""Pipelines whose prompts are encoded ahead, and how often their text encoders really run."""

import contextlib
import functools
import json
import os
import types
from unittest import mock

import tiny_pipelines
import torch
from safetensors.torch import save_file
from tiny_runs import SETTINGS, latent_mean, trained_weights, trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.data.inputs import PipelineInputs
from diffusion_grpo.policy.prompt_store import MemoryShelf, PromptStore
from diffusion_grpo.policy.token import make_policy
from diffusion_grpo.training.prompt_embeds import PromptEmbeds
from diffusion_grpo.training.text_encoders import TextEncoders, list_text_encoders

ALONE = types.SimpleNamespace(num_processes=1)  # of an accelerator, all that is asked for


@contextlib.contextmanager
def counted(pipe):
    """Collect inside what the text encoders of this kind of pipeline compute: their number, and rows of token ids."""
    calls, parts = [], []

    def counting(real, self, *args, **kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self not in parts:
            parts.append(self)
        calls.append((parts.index(self), ids.tolist() if torch.is_tensor(ids) else None))
        return real(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for cls in {type(getattr(pipe, name)) for name in list_text_encoders(pipe.components)}:
            forward = functools.partialmethod(
                lambda self, *a, real, **k: counting(real, self, *a, **k), real=cls.forward
            )
            stack.enter_context(mock.patch.object(cls, "forward", forward))
        yield calls


def single(calls):
    """Those calls that encode one prompt."""
    return [(number, json.dumps(ids)) for number, ids in calls if ids is not None and len(ids) == 1]


def case(name, folder):
    """A policy of a tiny pipeline, its inputs, and settings of its calls, for one sample each."""
    pipe, given = tiny_pipelines.build(name)
    given = {key: value[0] if isinstance(value, list) else value for key, value in given.items() if key != "prompt"}
    args = DiffusionGRPOConfig(str(folder), **SETTINGS, pipeline_kwargs=given)
    return make_policy(pipe), PipelineInputs(pipe, args)


def embeds(policy, inputs, folder, shelf=None, vary=lambda arguments: [arguments], reload=None):
    """What encodes the prompts of such a case ahead, in a single process."""
    encoders = TextEncoders(policy.pipe, reload, folder, torch.device("cpu"))
    return PromptEmbeds(
        policy=policy,
        inputs=inputs,
        encoders=encoders,
        store=PromptStore(MemoryShelf() if shelf is None else shelf, encoders.watch),
        process=0,
        processes=1,
        num_inference_steps=4,
        vary=vary,
    )


def run(folder, settings):
    """Train as one of several processes; write the weights, and what this process encoded."""
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    settings["gradient_accumulation_steps"] //= processes
    if settings["cache_prompt_embeds"] == "disk":  # each process on a machine of its own
        settings["prompt_embeds_dir"] = str(folder / f"embeds-{rank}")
    with counted(tiny_pipelines.build("sd3")[0]) as calls:
        trainer = trainer_for(folder / "run", rewards=latent_mean, watch_rewards=None, **settings)
        ahead = len(calls)
        trainer.train()
        trainer.evaluate()
    assert len(calls) == ahead
    (folder / f"calls-{rank}.json").write_text(json.dumps(single(calls)))
    if trainer.is_world_process_zero():
        save_file(trained_weights(trainer), folder / "weights.safetensors")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
