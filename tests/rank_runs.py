"""What each process of a test with several does; see `ranks_server.py`."""

import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import conftest  # noqa: F401
import plain_attention
import ranks_server
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tiny_runs import SMOOTH, SMOOTH_VIDEOS, blue, brightness, first_frame_brightness, trained_weights, trainer_for
from zero_run import deepspeed_config, use_deepspeed_on_a_cpu

from diffusion_grpo import trainer as trainer_module
from diffusion_grpo.algorithms import grpo
from diffusion_grpo.data import inputs
from diffusion_grpo.distributed import collectives, failure, late_weights
from diffusion_grpo.policy import networks
from diffusion_grpo.rollout import generate
from diffusion_grpo.training import checkpoints, evaluation
from diffusion_grpo.weights import files as hub


def rank():
    return int(os.environ.get("RANK", 0))


def kill_in(module, name, calls_before=0):
    """Kill this process in call number `calls_before` + 1 of `module.name`, once the work is done."""
    real, calls = getattr(module, name), []

    def deadly(*args, **kwargs):
        calls.append(None)
        result = real(*args, **kwargs)
        if len(calls) > calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, deadly)


def uneven(images, log_metric, **columns):
    """A reward that logs a metric of dark images only, so perhaps on one process alone."""
    values = brightness(images)
    for value in values:
        if value < 0.5:
            log_metric("dark", value)
    log_metric(f"of_rank_{rank()}", 1.0 + rank())
    return values


REWARDS = {"brightness": brightness, "video": first_frame_brightness, "blue": [blue], "uneven": uneven}
REWARDS |= {"smooth": SMOOTH["rewards"], "smooth video": SMOOTH_VIDEOS["rewards"]}


def built(folder, settings, rewards=brightness):
    """Build a trainer; sizes in `settings` are given for one process, `rows` are the columns of the dataset; `mode` is
    "zero1", "zero2", "zero3", "zero3-layered", "fsdp2", or DDP by default."""
    settings = dict(settings)
    processes = int(os.environ.get("WORLD_SIZE", 1)) // settings.get("context_parallel_size", 1)
    mode = settings.pop("mode", "ddp")
    assert mode in ("ddp", "zero1", "zero2", "zero3", "zero3-layered", "fsdp2"), mode
    if mode.startswith("zero"):
        use_deepspeed_on_a_cpu()
        settings |= {"deepspeed": deepspeed_config(int(mode[4])), "ds3_gather_for_generation": mode == "zero3"}
    elif mode == "fsdp2":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if name in settings:
            assert settings[name] % processes == 0
            settings[name] //= processes
    rows, held_out = settings.pop("rows", None), settings.pop("held_out", None)
    if isinstance(rewards, dict):
        settings["eval_reward_funcs"] = rewards["evaluated"]
        rewards = rewards["trained"]
    own = trainer_for(folder, rewards=rewards, **settings)
    if rows:
        own.train_dataset = Dataset.from_dict(rows)
    if held_out:
        own.eval_dataset = Dataset.from_dict(held_out if isinstance(held_out, dict) else {"prompt": held_out})
    return own


def train(folder, settings, rewards="brightness", resume=None):
    """Train; process 0 writes what it logged and the final weights."""
    own = built(folder, settings, REWARDS[rewards])
    own.train(resume_from_checkpoint=resume)
    own.save_model()
    if own.is_world_process_zero():
        report = {"wrapper": type(own.model_wrapped).__name__, "log": own.state.log_history}
        (Path(folder) / "result.json").write_text(json.dumps(report))
    write_weights(own, folder)
    leave_group()


def write_weights(trainer, folder):
    """Let process 0 write the trained weights, of which each process may have a part."""
    is_first = trainer.is_world_process_zero()
    with trainer.learner.weights.show_whole(is_kept=is_first):
        if is_first:
            save_file(trained_weights(trainer), Path(folder) / "weights.safetensors")


def leave_group():
    """Leave the group of processes, if this is one of several."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trained(folder, processes, settings, rewards="brightness", resume=None, by=train):
    """Let processes `train` in `folder / "run"`; return the class of the wrapper, the log of updates, the weights."""
    ranks_server.succeed(folder, processes, by, folder / "run", settings, rewards, resume)
    report = json.loads((folder / "run" / "result.json").read_text())
    updates = [entry for entry in report["log"] if "grad_norm" in entry]
    return report["wrapper"], updates, load_file(folder / "run" / "weights.safetensors")


def write_late(folder, settings):
    """`train`, where process 1 is slow to write its part of a checkpoint."""
    save, seconds = checkpoints.Checkpointer.save_rollout, 0.5 * rank()
    checkpoints.Checkpointer.save_rollout = lambda *args: time.sleep(seconds) or save(*args)
    train(folder, settings)


def regulate(folder, settings):
    """Train with a learning rate that regulates itself, and write every process's state of it and sum of weights."""
    own = built(folder, settings)
    own.train()
    with own.learner.weights.show_whole():
        total = sum(value.double().sum().item() for value in trained_weights(own).values())
    states = collectives.gather_json(own.accelerator, [own.state.stateful_callbacks["StepSize"], total])
    if own.is_world_process_zero():
        (Path(folder) / "result.json").write_text(json.dumps(states))
    torch.distributed.destroy_process_group()


def guard(folder, settings):
    """Train until a limit ends the run: what is only evaluated falls after update 2. Each process notes where."""

    def watched(images, trainer_state, **columns):
        return [value - (trainer_state.global_step > 2) for value in brightness(images)]

    trainer = trainer_for(folder, eval_reward_funcs=watched, rewards=brightness, **settings)
    trainer.train()
    noted = {"step": trainer.state.global_step, "stopped": trainer.run["stopped"]}
    (folder / f"stopped-{rank()}.json").write_text(json.dumps(noted))
    torch.distributed.destroy_process_group()


def train_apart(folder, settings, resume=None):
    """`train` on machines of one process each that share no disk, neither for the run nor for its prompts."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    own = folder / f"machine-{rank()}"
    settings = settings | {"cache_prompt_embeds": "disk", "prompt_embeds_dir": str(own / "embeds")}
    train(own, settings | {"save_on_each_node": False}, resume=resume)  # what the disks are like decides, not this


def train_in_rings(folder, settings, *rest):
    """`train` with context parallelism by rings."""
    plain_attention.install()
    train(folder, settings | {"context_parallel_type": "ring"}, *rest)


def first_weights(settings, rewards=brightness):
    """Return the trained weights before any update."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: value.cpu() for name, value in trained_weights(built(folder, settings, rewards)).items()}


def fail(folder, settings, where):
    """Make process 1 fail, or process 0 if the disk is full; `where` says how."""

    def write(*args):
        raise OSError(28, "No space left on device")

    if rank() == 0 and where == "disk":
        trainer_module.write_json = write

    def fragile(images, **columns):
        if rank() == 1 and where == "reward" and own.state.global_step == 1:
            raise ValueError("the scorer is out")
        if rank() == 1 and where == "evaluation" and "3" in columns["prompts"]:
            raise ValueError("the scorer is out")
        if rank() == 1 and where == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        return brightness(images)

    def loss(*args):
        if rank() == 1 and where in ("bug", "lingering") and own.state.global_step == 1:
            raise ZeroDivisionError("a loss of one's own")
        output = real_loss(*args)
        if rank() == 1 and where == "loss" and own.state.global_step == 1:
            output = dataclasses.replace(output, loss=output.loss * float("nan"))
        return dataclasses.replace(output, drift=0.5) if rank() == 1 and where == "ratio" else output

    real_rows = inputs.PipelineInputs.rows

    def rows(self, dataset, numbers):
        if rank() == 1 and where == "rows":
            raise OSError("cannot read 17.png")
        return real_rows(self, dataset, numbers)

    inputs.PipelineInputs.rows = rows
    failure.GRACE_PERIOD = 1.0
    evaluation.KEPT_BYTES = 1
    own = built(folder, settings, fragile)
    real_loss, own.learner.algorithm.loss = own.learner.algorithm.loss, loss
    try:
        own.train()
    except ZeroDivisionError:
        time.sleep(5 if where == "lingering" else 0)  # its connections stay open, and no collective breaks
        raise


def catch(folder, settings):
    """Fail on both processes, catch the error, and go on."""
    failure.GRACE_PERIOD = 0.5
    own = built(folder, settings)
    with contextlib.suppress(ValueError), own.monitor.propagate_errors():
        raise ValueError("a setting that cannot be")
    with own.monitor.propagate_errors():
        time.sleep(3)
    print("went on")


def die(folder, settings, moment, calls):
    """Kill a process in a rollout, a reward, an update or while a checkpoint is written."""
    if moment == "reward":
        return fail(folder, settings, "dead")
    if rank() == (0 if moment == "checkpoint" else 1):  # process 0 is the one that writes
        place = {
            "rollout": (generate, "RolloutRequest"),
            "update": (grpo.GRPO, "loss"),
            "checkpoint": (hub, "save_policy"),
        }
        kill_in(*place[moment], calls)
    built(folder, settings).train()


def evaluate(folder, settings, trains=False):
    """Evaluate by a reward that logs, in the smallest parts; train first to have the weights sharded."""
    evaluation.KEPT_BYTES = 1
    own = built(folder, settings, uneven)
    if trains:
        own.train()
    metrics = own.evaluate()
    if own.is_world_process_zero():
        (Path(folder) / "result.json").write_text(json.dumps(metrics))
    leave_group()


def move_reference(folder, settings):
    """Train with a reference that follows the policy, then read one of its checkpoints twice.

    Once into the trainer that wrote it, whose reference is sharded by then, from where it is saved to `back`; and once
    into a new trainer, `again`.
    """
    point = folder / "whole" / "checkpoint-1"
    trainer = built(folder / "whole", settings, REWARDS["smooth"])
    trainer.train()
    trainer.checkpointer.load(point)
    trainer.checkpointer.save_beside_weights(folder / "back")
    trainer.accelerator.wait_for_everyone()
    built(folder / "again", settings, REWARDS["smooth"]).train(resume_from_checkpoint=str(point))
    torch.distributed.destroy_process_group()


def train_from_files(folder, runs):
    """Train models that are named by their folder, and report what was materialised before and after the engine.

    Of settings, `late` False loads as in one process, and `resume` is the run whose first checkpoint is gone on from.
    """
    for name, settings in runs.items():
        settings = dict(settings)
        resume = settings.pop("resume", None)
        with contextlib.ExitStack() as stack:
            if not settings.pop("late"):
                stack.enter_context(networks.replace_attribute(late_weights, "read_late", contextlib.nullcontext))
                stack.enter_context(networks.replace_attribute(late_weights, "hold", torch.nn.Module.to))
            own = built(folder / name, settings)
            copy = None if own.learner.reference is None else own.learner.reference.module
            before = [held_back(model) for model in (own.model, copy) if model is not None]
            own.train(resume_from_checkpoint=resume and str(folder / resume / "checkpoint-1"))
            own.save_model()
        own.accelerator.wait_for_everyone()
        report = {"before": before, "after": held_back(own.model), "log": own.state.log_history}
        (folder / name / f"result-{rank()}.json").write_text(json.dumps(report))
        write_weights(own, folder / name)
    torch.distributed.destroy_process_group()


def held_back(model):
    """Return how many bytes a model's parameters take in memory, and how many of them are stand-ins."""
    parameters = list(model.parameters())
    waiting = sum(late_weights.is_waiting(parameter) for parameter in parameters)
    return {"bytes": sum(parameter.untyped_storage().nbytes() for parameter in parameters), "waiting": waiting}
