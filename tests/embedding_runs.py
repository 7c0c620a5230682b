"""Pipelines whose prompts are encoded ahead, and how often their text encoders really run."""

import contextlib
import functools
import json
import os
import types
from unittest import mock

import tiny_pipelines
import torch
from datasets import Dataset
from rank_runs import built, leave_group, write_weights
from tiny_runs import SETTINGS, latent_mean

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.data.inputs import PipelineInputs
from diffusion_grpo.distributed.failure import ProcessGroupMonitor
from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.prompt_cache import KeptResults
from diffusion_grpo.policy.token import make_policy
from diffusion_grpo.training.lazy_modules import list_text_encoders
from diffusion_grpo.training.prompt_embeds import PromptEmbeds

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


def case(name, folder, **settings):
    """A policy of a tiny pipeline, its inputs, and settings of its calls, for one sample each."""
    pipe, given = tiny_pipelines.build(name)
    given = {key: value[0] if isinstance(value, list) else value for key, value in given.items() if key != "prompt"}
    args = DiffusionGRPOConfig(str(folder), **SETTINGS | settings, pipeline_kwargs=given)
    return make_policy(pipe), PipelineInputs(pipe, args)


def embeds(policy, inputs):
    """What encodes the prompts of such a case ahead, in a single process."""
    return PromptEmbeds(policy, inputs, KeptResults(), ProcessGroupMonitor(ALONE, ()))


def run(folder, settings, source=None):
    """Train as one of several processes; write the weights, and what this process encoded.

    `settings` are given for one process, `mode` among them, as in `rank_runs.built`; `source` is the folder of the
    model, by default a pipeline is given.
    """
    rank, settings = int(os.environ.get("RANK", 0)), dict(settings)
    if source is not None:
        settings |= {"model": str(source), "pipeline_kwargs": {"max_sequence_length": 32}}
    if settings.get("cache_prompt_embeds") == "disk":  # each process on a machine of its own
        settings["prompt_embeds_dir"] = str(folder / f"embeds-{rank}")
    with counted(tiny_pipelines.build("sd3")[0]) as calls:
        trainer = built(folder / "run", settings | {"watch_rewards": None}, latent_mean)
        ahead = len(calls)
        trainer.train()
        trainer.evaluate()
    during = len(calls) - ahead
    report = {"wrapper": type(trainer.model_wrapped).__name__, "during": during, "log": trainer.state.log_history}
    report["calls"] = single(calls)
    (folder / f"result-{rank}.json").write_text(json.dumps(report))
    trainer.save_model()
    write_weights(trainer, folder)
    leave_group()


def fail(folder, settings, where):
    """Encode on two processes, of which process 1 fails: `where` is "start", "exchange" or "evaluation"."""
    rank, real = int(os.environ.get("RANK", 0)), DenoisingPolicy.encode_prompts

    def encode(self, inputs, *args):
        if rank == 1 and {"start": "a blue dog", "evaluation": "and a third"}.get(where, " ") in inputs["prompt"]:
            raise OSError("cannot read the tokenizer")
        return real(self, inputs, *args)

    def put(self, key, result, text):
        if rank == 1 and not text and not key.startswith("layout"):  # what comes from the other process
            raise OSError("no space left on device")
        return kept(self, key, result, text)

    DenoisingPolicy.encode_prompts, kept = encode, KeptResults.put
    if where == "exchange":
        KeptResults.put = put
    trainer = built(folder, settings | {"cache_prompt_embeds": "memory"}, latent_mean)
    trainer.evaluate(Dataset.from_dict({"prompt": ["another", "and a third", "one more", "the last"]}))
