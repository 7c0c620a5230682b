"""Short runs on tiny random pipelines: settings enter, a trainer ready to run leaves.

One file for all tests of the trainer, so that each states only what it is about.
"""

import contextlib
from pathlib import Path

import numpy as np
import pyarrow.parquet
import tiny_pipelines
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.rewards import differentiable, takes_latents

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
PROMPTS = ["a red cat", "a blue dog", "a tree", "the sea at night"]
SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_inference_steps": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "eval_on_start": False,
    "report_to": "none",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


RENOISED, LANGUAGE_MODELS = ("nft", "awm", "dgpo", "dpo"), ("writer", "vision_language_encoder")


def with_every_step(settings: dict) -> dict:
    """Settings under which all steps have noise, all are trained, and samples have latents of their own.

    What the settings say themselves stays. The defaults train one step, whose calls samples of a prompt share; most
    tests want to see more than that.
    """
    own: dict = {"samples_per_latent": 1}
    loss_type = settings.get("loss_type", "grpo")
    if loss_type not in RENOISED and "." not in loss_type and settings.get("train_component") not in LANGUAGE_MODELS:
        is_branched = settings.get("samples_per_latent") not in (None, 1, "group")
        own |= {"trained_steps": "all", "noisy_steps": "trained" if is_branched else "all"}
    return own | settings


# of each update's two prompts one is guided by a negative prompt, in twice as many passes of the network
OPTIONAL = {
    "name": "flux",
    "pipeline_kwargs": {"max_sequence_length": 32, "true_cfg_scale": 3.0},
    "columns": {"negative_prompt": ["grey", None, "blurred", None]},
    "shuffle_dataset": False,
}
GUIDED = {"name": "wan", "guidance_scale": None, "columns": {"guidance_scale": [5.0, 1.0, 5.0, 1.0]}}
GUIDED |= {"shuffle_dataset": False}


def edited_images(folder: Path) -> dict:
    """Settings of a run that edits images of two sizes, and a prompt without one; written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{width}.png") for width in (16, 32)]
    for width, path in zip((16, 32), paths, strict=True):
        numbers = np.random.default_rng(width).integers(0, 255, (16, width, 3), dtype=np.uint8)
        Image.fromarray(numbers).save(path)
    return {
        "name": "flux_kontext",
        "pipeline_kwargs": {"max_sequence_length": 32, "max_area": 256, "_auto_resize": False},
        "columns": {"image": [*paths, paths[0], None]},
        "shuffle_dataset": False,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
    }


def brightness(images: list[Image.Image], **columns) -> list[float]:
    """Mean grey value in [0, 1]."""
    return [float(np.asarray(image.convert("L")).mean() / 255) for image in images]


@differentiable
def blue(images, **columns):
    """How much bluer than red, of images (batch, 3, height, width)."""
    return images[:, 2].mean((1, 2)) - images[:, 0].mean((1, 2))


@takes_latents
def latent_mean(latents, weight=None, **columns) -> torch.Tensor:
    """Mean of each sample's latents: as smooth as the network, where a pixel of 8 bits jumps from level to level.

    A column `weight` multiplies it.
    """
    means = latents.flatten(1).mean(1)
    return means if weight is None else means * torch.tensor(weight)


def first_frame_brightness(videos: list[list[Image.Image]], **columns) -> list[float]:
    """The same of each video's first frame."""
    return brightness([frames[0] for frames in videos])


# What several processes train is compared with one to 1e-6. After an update their weights differ by about 1e-8, which
# may round a pixel of the next rollout to another level: that moves a reward by 4e-6, and group normalization and
# AdamW make 1e-4 of it in a weight. So the latents are trained on; pixels are decoded and scored, but weigh nothing.
SMOOTH = {"rewards": [brightness, latent_mean], "reward_weights": [0.0, 1.0]}
SMOOTH_VIDEOS = SMOOTH | {"rewards": [first_frame_brightness, latent_mean]}


def trainer_for(
    output_dir: Path | str, name: str = "sd3", lora: bool = True, rewards=brightness, seed: int = 0, **settings
) -> DiffusionGRPOTrainer:
    """A trainer of the tiny pipeline `name`: a LoRA by default, held-out prompts where `eval_strategy` is set.

    `columns` go beside the prompts that are trained on. `eval_dataset` replaces the held-out prompts, `model` the new
    pipeline, and `peft_config` the usual LoRA.
    """
    pipe, inputs = tiny_pipelines.build(name, seed)
    pipe, peft_config = settings.pop("model", pipe), settings.pop("peft_config", LoraConfig(**LORA) if lora else None)
    from_config = {key: inputs[key] for key in ("height", "width", "num_frames", "guidance_scale") if key in inputs}
    rest = {key: value for key, value in inputs.items() if key not in from_config and key != "prompt"}
    eval_reward_funcs = settings.pop("eval_reward_funcs", None)
    callbacks = settings.pop("callbacks", None)
    columns = settings.pop("columns", {})
    held_out = settings.pop("eval_dataset", None) or Dataset.from_dict({"prompt": ["held out", "and another"]})
    settings = {"pipeline_kwargs": tiny_pipelines.of_every_prompt(rest), **from_config, **settings}
    settings = with_every_step({**SETTINGS, **settings})
    args = DiffusionGRPOConfig(output_dir=str(output_dir), **settings)
    return DiffusionGRPOTrainer(
        model=pipe,
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, **columns}),
        eval_dataset=held_out,
        peft_config=peft_config,
        eval_reward_funcs=eval_reward_funcs,
        callbacks=callbacks,
    )


def finished_run(*args, **settings) -> DiffusionGRPOTrainer:
    """The trainer of a run, as `trainer_for` makes it, that has ended."""
    trainer = trainer_for(*args, **settings)
    trainer.train()
    return trainer


def logged(trainer: DiffusionGRPOTrainer, key: str) -> list[float]:
    """The values of a metric, one per log entry that has it."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def read_table(run: Path, step: int = 0, kind: str = "samples") -> dict[str, list]:
    """The columns of a table of samples that a run wrote before update `step`, or of its "evaluations"."""
    return pyarrow.parquet.read_table(run / kind / f"step-{step:06d}.parquet").to_pydict()


def list_tags(run: Path, kind: str) -> list[str]:
    """The names under which tensorboard has images, sounds or curves of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = (run / "runs").iterdir()
    return EventAccumulator(str(folder)).Reload().Tags()[kind]


def joined_trajectory(trainer: DiffusionGRPOTrainer):
    """The trajectories of the running rollout, of this process and of one shape, as one."""
    samples = trainer.loader.buffer.samples
    return type(samples[0]).cat(samples)


def trained_weights(trainer: DiffusionGRPOTrainer) -> dict:
    """Copies of the trained parameters by name, as the pipeline uses them now."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def policy_weights(trainer: DiffusionGRPOTrainer) -> dict:
    """The policy's own, also where the pipeline has those of its moving average."""
    average = trainer.learner.average
    with contextlib.nullcontext() if average is None else average.place(is_shown=False):
        return trained_weights(trainer)


def are_equal(some: dict, others: dict) -> bool:
    """Whether tensors of the same names are equal to the last bit."""
    assert some.keys() == others.keys()
    return all(torch.equal(value, others[name]) for name, value in some.items())


def difference(some: dict, others: dict) -> float:
    """The largest between tensors of the same names."""
    assert some.keys() == others.keys()
    return max(float((value.cpu() - others[name].cpu()).abs().max()) for name, value in some.items())


def train_and_compare(trainer: DiffusionGRPOTrainer) -> set[str]:
    """Train; return the names of the weights that have moved."""
    before = trained_weights(trainer)
    trainer.train()
    return {name for name, value in trained_weights(trainer).items() if not torch.equal(value, before[name])}


def assert_resumes(make, folder: Path, *steps: int) -> list[DiffusionGRPOTrainer]:
    """A run that is trained whole, and again from its checkpoints of some steps; all end with the same weights.

    `make` gives a trainer in a folder.
    """
    runs = [make(folder / "whole")]
    runs[0].train()
    expected = policy_weights(runs[0])
    for step in steps:
        runs.append(make(folder / f"from-{step}"))
        runs[-1].train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
        assert are_equal(policy_weights(runs[-1]), expected)
    return runs


FEW = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}


def train_briefly(pipe, inputs, folder, steps, updates):
    """Some updates; images and prompts come from the dataset, all else from the settings."""
    inputs = {key: [value] * 2 if isinstance(value, Image.Image) else value for key, value in inputs.items()}
    columns = {key: value for key, value in inputs.items() if _is_column(value)}
    rows = {"prompt": ["a red cat", "a blue dog"], **{key: value for key, value in columns.items() if key != "prompt"}}
    fixed = {key: value for key, value in inputs.items() if key not in rows}
    own = {"trained_steps": [0, min(steps, 2)], "epsilon": 0.1, "max_steps": updates}
    if isinstance(inputs.get("prompt"), str):  # known to work for one sample in a call
        own |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    if any(isinstance(value, list) and isinstance(value[0], list) for value in fixed.values()):
        own["samples_per_latent"] = 1  # they fit calls of two samples, and samples that share calls make smaller ones
    args = DiffusionGRPOConfig(str(folder), **{**SETTINGS, **FEW, **own}, pipeline_kwargs=fixed)
    trainer = DiffusionGRPOTrainer(
        pipe,
        first_number,
        args,
        train_dataset=Dataset.from_dict(rows),
        peft_config=LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]),
    )
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    after = [p for p in trainer.model.parameters() if p.requires_grad]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    errors = [entry["ratio/max_error"] for entry in trainer.state.log_history if "ratio/max_error" in entry]
    assert len(errors) == updates and max(errors) <= 1e-5


def _is_column(value):
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, (str, Image.Image)) for item in value)


def first_number(completions, **columns):
    """A reward that any completion has: what its values add up to."""
    return [float(torch.as_tensor(_array(completion)).float().mean()) for completion in completions]


def _array(completion):
    if isinstance(completion, list):
        return np.stack([np.asarray(frame) for frame in completion])
    return np.asarray(completion)
