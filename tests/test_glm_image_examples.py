"""GLM-Image's example files, each run as it is written, on a tiny random pipeline of the same classes.

Two updates of one rollout, evaluations, a resume in its middle that gives the same weights, and the saved LoRA in a
pipeline that knows nothing of the training. Only the model, sizes and the number of samples are replaced; rewards that
need weights, or read nothing in pictures this small, answer with a brightness under the arguments that the file gives.
"""

import functools
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_pipelines
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from tiny_pipelines import glm
from tiny_runs import brightness
from transformers import GlmImageProcessor

import diffusion_grpo
from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, cli, commands
from diffusion_grpo.arguments import parse_train_arguments, read_yaml
from diffusion_grpo.hub import LORA_WEIGHTS
from diffusion_grpo.rewards import REWARDS

ROOT = Path(__file__).parent.parent
FILES = {"glm_image_ar": "glm_image", "glm_image_dit": "glm_image", "glm_image_edit": "glm_image_edit"}
SMALL = {
    "height": 64,
    "width": 64,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "num_inference_steps": 6,
    "eval_num_inference_steps": 2,
    "max_steps": 2,
    "save_steps": 1,
    "eval_steps": 2,
    "warmup_steps": 0,
    "learning_rate": 0.02,
    "lora_r": 4,
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture
def at_root(monkeypatch):
    """The working directory of the examples."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(GlmImageProcessor, "_get_target_shape", staticmethod(glm._target_shape))
    read = functools.wraps(REWARDS["text"])(lambda images, **columns: brightness(images))
    monkeypatch.setitem(REWARDS, "text", read)
    for name in ("lpips", "aesthetic"):
        monkeypatch.setattr(REWARDS[name], "__call__", lambda self, images, **columns: brightness(images))


def shrunk(folder, dataset):
    """A copy of a file of prompts whose pictures are as small as the tiny processor takes them."""
    shutil.copytree(ROOT / "examples" / "data", folder)
    for path in (folder / "pictures").glob("*.png"):
        Image.open(path).resize((glm.SIZE, glm.SIZE)).save(path)
    return folder / Path(dataset).name


def flags(settings):
    """The command line's words for some settings."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_file_runs(name, tmp_path, at_root, monkeypatch):
    trainers, build = [], commands.train.build_trainer
    monkeypatch.setattr(commands.train, "build_trainer", lambda *args: trainers.append(build(*args)) or trainers[-1])
    file, model, run = f"examples/{name}.yaml", tmp_path / "model", tmp_path / "run"
    pipe, inputs = tiny_pipelines.build(FILES[name])
    pipe.save_pretrained(model)
    data = shrunk(tmp_path / "data", read_yaml(file)["dataset"])
    changed = {**SMALL, "model": model, "output_dir": run, "dataset": data, "eval_dataset": data}

    assert cli.main(["train", file, *flags(changed)]) == 0
    log = trainers[0].state.log_history
    assert [entry["ratio/max_error"] for entry in log if "ratio/max_error" in entry] == [0.0]
    rewards = {key for entry in log for key in entry if key.startswith("rewards/") and key.endswith("/mean")}
    assert len(rewards) == 4 and trainers[0].reward_weights == [0.4, 0.2, 0.3, 0.1]
    assert sum("eval_reward" in entry for entry in log) == 1
    unbroken = load_file(run / "adapter_model.safetensors")

    shutil.rmtree(run / "checkpoint-2")
    assert cli.main(["train", file, *flags(changed), "--resume_from_checkpoint=true"]) == 0
    resumed = load_file(run / "adapter_model.safetensors")
    assert all(torch.equal(resumed[key], value) for key, value in unbroken.items())

    plain, untrained = DiffusionPipeline.from_pretrained(model), DiffusionPipeline.from_pretrained(model)
    if name == "glm_image_dit":
        plain.transformer.load_lora_adapter(run, prefix=None, weight_name=LORA_WEIGHTS)
    else:
        PeftModel.from_pretrained(plain.vision_language_encoder, run)
    inputs.pop("image", None)  # a plain call of image-to-image fails in this diffusers
    made = [sample(pipe, inputs) for pipe in (trainers[-1].pipe, plain, untrained)]
    assert np.array_equal(made[0], made[1]) and not np.array_equal(made[0], made[2])


def sample(pipe, inputs):
    """What a pipeline makes by itself, as numbers."""
    pipe.set_progress_bar_config(disable=True)
    return pipe(**inputs, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images


def test_the_python_form_says_the_same(tmp_path, at_root, monkeypatch):
    file, given = "examples/glm_image_ar.yaml", {}
    settings = {key: value for key, value in SMALL.items() if key != "lora_r"} | {"output_dir": str(tmp_path)}
    pipe, _ = tiny_pipelines.build("glm_image")

    def config(**said):
        given["settings"] = said
        return DiffusionGRPOConfig(**said | settings)

    def trainer(**said):
        given.update(said)
        given["trainer"] = DiffusionGRPOTrainer(**said | {"model": pipe})
        return given["trainer"]

    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOConfig", config)
    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOTrainer", trainer)
    runpy.run_path("examples/glm_image.py", run_name="__main__")

    script, lora, args = parse_train_arguments(file, ["--use_cpu=true"])
    assert DiffusionGRPOConfig(**given["settings"], use_cpu=True).to_dict() == args.to_dict()
    assert given["model"] == script.model and given["reward_funcs"] == read_yaml(file)["reward_funcs"]
    assert (
        given["train_dataset"].to_dict() == commands.inputs.load_checked(script.dataset, "train", "dataset").to_dict()
    )
    mine, theirs = given["peft_config"], lora.peft_config()
    assert (mine.r, mine.lora_alpha, mine.target_modules) == (theirs.r, theirs.lora_alpha, theirs.target_modules)
    assert given["trainer"].state.global_step == 2 and (tmp_path / "adapter_model.safetensors").is_file()
