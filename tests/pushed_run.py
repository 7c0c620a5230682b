"""A stand-in for the Hub, and runs that push to it as processes of `ranks_server.py`; nothing leaves the machine."""

import json
from types import SimpleNamespace

import torch
import transformers.trainer
from rank_runs import rank
from tiny_runs import trainer_for

from diffusion_grpo.training import base


def make_client(uploads):
    """Return a class in place of the Hub's client; `uploads` gets the places in the repository that are pushed to."""

    class Client:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, path_in_repo=None, **kwargs):
            uploads.append(path_in_repo or "top")
            return SimpleNamespace(done=lambda: True, result=lambda: None)

    return Client


def run(folder, settings, strategies):
    """Train and push with each `hub_strategy`; write the places in the repository that this process pushed to."""
    uploads, found = [], {}
    transformers.trainer.hf_api = base.hf_api = make_client(uploads)
    base.check_hub_access = lambda token: None
    for strategy in strategies:
        trainer = trainer_for(
            folder / strategy, push_to_hub=True, hub_model_id="mine", hub_strategy=strategy, **settings
        )
        trainer.train()
        found[strategy] = [*uploads]
        trainer.push_to_hub()
        found[strategy] += ["the end", *uploads[len(found[strategy]) :]]
        uploads.clear()
    (folder / f"uploads-{rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
