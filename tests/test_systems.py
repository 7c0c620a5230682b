"""The reference systems: each example file is run as it is written, on a tiny random pipeline of the same classes.

Two updates, evaluations, a resume that gives the same weights, and what plain diffusers makes of what was saved. Only
the model, its sizes and the number of samples are replaced; rewards that need weights or a server, or see nothing
in images this small, answer with the brightness, under the arguments that the file gives them.
"""

import copy
import functools
import inspect
import json
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_pipelines
import torch
import transformers
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    GlmImagePipeline,
    ModularPipeline,
    PipelineQuantizationConfig,
    StableDiffusionControlNetPipeline,
    TorchAoConfig,
)
from peft import PeftModel
from PIL import Image
from planned_runs import STAND_INS
from safetensors.torch import load_file
from tiny_pipelines import glm
from torchao.quantization import Int8WeightOnlyConfig
from transformers import GlmImageProcessor

import diffusion_grpo
from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, cli
from diffusion_grpo.config.parse import parse_train_arguments, read_yaml
from diffusion_grpo.data.prompts import load_prompts
from diffusion_grpo.media.samples import extract_samples
from diffusion_grpo.pipelines import family_of
from diffusion_grpo.policy.modular import as_pipeline
from diffusion_grpo.rewards import REWARDS, RemoteReward
from diffusion_grpo.rewards.models.hpsv3 import HPSv3
from diffusion_grpo.rewards.models.videoalign import VideoAlign
from diffusion_grpo.weights.files import LORA_WEIGHTS

ROOT = Path(__file__).parent.parent
PYTHON = {  # script: the file that says the same
    "flux_kontext": "flux_kontext",
    "sd35": "sd35_ocr",
    "sdxl": "sdxl",
    "wan21": "wan21_ocr",
}
SETTINGS = {setting.name for setting in DiffusionGRPOConfig.__dataclass_fields__.values()}
# In CI some files are run as they are written, and of one file of each further kind an update is made.
WHOLE = ("24gb/flux", "glm_image_ar", "sd35_ocr", "wan22_a14b")
UPDATED = "24gb/qwen_image 24gb/wan22_ti2v fast/sd35 fast/wan22_a14b flux2_klein flux3 glm_image_dit glm_image_edit"
UPDATED += " hunyuan_video qwen_image_edit sana_sprint sd15 sd15_alignprop sd35_ocr_fast sdxl_inpaint stable_audio"
UPDATED += " wan21_gae wan22_image_to_video wan22_ti2v_5b z_image_turbo"
SIZES = ("max_area", "audio_end_in_s")  # among the pipeline's own arguments
STEPS = 4
SMALL = {
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,  # two updates per rollout: the resume falls within one
    "max_steps": 2,
    "save_steps": 1,
    "eval_steps": 1,
    "validation_steps": 1,
    "save_samples_steps": 1,
    "eval_max_prompts": 3,  # more than fit into a batch
    "warmup_steps": 0,
    "learning_rate": 1e-3,
    "lora_r": 4,
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


def small(values, inputs):
    """What is put over a file's settings: the model's sizes and few samples."""
    changed = dict(SMALL) | {
        key: value for key, value in inputs.items() if key in SETTINGS and key != "guidance_scale"
    }
    changed["num_generations"] = 4 if "best_of_n" in values else min(2, values["num_generations"])
    for side in ("train", "eval"):  # one sample per call stays one
        changed[f"per_device_{side}_batch_size"] = min(2, values["per_device_train_batch_size"])
    changed["num_inference_steps"] = changed["eval_num_inference_steps"] = min(
        STEPS, values.get("num_inference_steps", STEPS)
    )
    if "best_of_n" in values:
        changed["best_of_n"] = 2
    if "rollout_batch_size" in values:
        changed["rollout_batch_size"] = min(2, values["rollout_batch_size"])
    if values.get("train_component") == "vision_language_encoder":
        changed["learning_rate"] = 0.02  # smaller steps change no token
    if "sigmas" in values:
        changed["sigmas"] = "even"
    if "trained_steps" in values:
        changed["trained_steps"] = [0, 2]
    if "ema_decay" in values:
        changed["ema_update_interval"] = 1  # what is saved is the average, and there are two updates
    if values.get("num_trained_steps", 1) > 1:
        changed["num_trained_steps"] = 2
    fixed = {
        key: value
        for key, value in inputs.items()
        if key not in SETTINGS and isinstance(value, str | int | float | tuple)
    }
    own = {key: value for key, value in values.get("pipeline_kwargs", {}).items() if key not in SIZES}
    changed["pipeline_kwargs"] = fixed | own
    return {key: value for key, value in changed.items() if key in values or key != "lora_r"}


def own_settings(changed):
    """Those that are no arguments of a script or of a LoRA."""
    return {key: value for key, value in changed.items() if key in SETTINGS}


def shrunk(folder, dataset, side):
    """A copy of a dataset whose images are small too."""
    if not folder.exists():
        shutil.copytree(ROOT / "examples" / "data", folder)
        for path in (folder / "pictures").glob("*.png"):
            Image.open(path).resize((side, side)).save(path)
    return str(folder / Path(dataset).name)


def flags(changed):
    """The command line's words for some settings."""
    words = []
    for key, value in changed.items():
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={json.dumps(value) if isinstance(value, (dict, bool)) else value}")
    return words


def brightness(samples):
    """Mean of each sample's values, whatever it is: it differs between any two samples."""
    frames = [sample if isinstance(sample, list) else [sample] for sample in samples]
    return [float(np.mean([np.asarray(part, dtype=float).mean() for part in parts])) for parts in frames]


def mean_pixel(images):
    """The same with a gradient, if images are a tensor."""
    return images.mean((1, 2, 3)) if torch.is_tensor(images) else brightness(images)


@pytest.fixture
def at_root(monkeypatch):
    """The working directory of the examples; rewards without weights or servers, that tell tiny images apart."""
    monkeypatch.chdir(ROOT)
    for name in ("text", "geneval", "jpeg_compressibility"):
        real = REWARDS[name]
        if inspect.isclass(real):
            monkeypatch.setattr(real, "__init__", functools.wraps(real.__init__)(lambda self, *args, **kwargs: None))
            monkeypatch.setattr(real, "__call__", lambda self, images, **columns: brightness(images))
        else:
            monkeypatch.setitem(REWARDS, name, functools.wraps(real)(lambda images, **columns: brightness(images)))
    scorers = [HPSv3, *(REWARDS[name] for name in ("lpips", "aesthetic", "clip_score", "pickscore"))]
    for reward in scorers:
        monkeypatch.setattr(reward, "__call__", lambda self, images, **columns: mean_pixel(images))
    monkeypatch.setattr(VideoAlign, "__call__", lambda self, videos, **columns: brightness(videos))
    monkeypatch.setattr(RemoteReward, "__call__", lambda self, completions, **columns: brightness(completions))
    for reward in (*scorers, REWARDS["geneval"], VideoAlign, RemoteReward):  # their weights and servers are not here
        monkeypatch.setattr(reward, "check_needs", lambda self, **options: None)
    monkeypatch.setattr(GlmImageProcessor, "_get_target_shape", staticmethod(glm.choose_target_shape))


def trained(folder):
    """The trained weights of a run's folder, by file."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")])
    names = ("pytorch_lora_weights", "adapter_model", "diffusion_pytorch_model")
    return {str(path.relative_to(folder)): load_file(path) for path in files if path.name.startswith(names)}


def assert_equal(found, expected):
    """Compare weights by file and name."""
    assert all(torch.equal(found[path][key], value) for path, part in expected.items() for key, value in part.items())


def prepare(name, folder, monkeypatch):
    """Save the tiny pipeline that stands for an example's; return the words of its run, and its inputs."""
    file, model, run = f"examples/{name}.yaml", folder / "model", folder / "run"
    pipe, inputs = tiny_pipelines.build(STAND_INS[name])
    if name.endswith("qwen_image_edit"):  # its processor can only be saved beside torchvision
        pipe.save_config(model)
        pipe.scheduler.save_pretrained(model / "scheduler")
        monkeypatch.setattr(transformers, "AutoVideoProcessor", object)  # is asked whether torchvision is there
        monkeypatch.setattr(
            DiffusionPipeline, "from_pretrained", lambda *_, **__: tiny_pipelines.build(STAND_INS[name])[0]
        )
    else:
        pipe.save_pretrained(model)
    values = read_yaml(file)
    changed = {"model": str(model), "output_dir": str(run), **small(values, inputs)}
    if values.get("cache_prompt_embeds") == "disk":
        changed["prompt_embeds_dir"] = str(folder / "embeds")
    if "quantization" in values:  # for 4 bits by bitsandbytes diffusers asks for a GPU; torchao's 8 bits take a CPU
        changed["quantization"] = dict.fromkeys(values["quantization"], "torchao")
    side = glm.SIZE if "glm" in name else 32
    changed |= {key: shrunk(folder / "data", values[key], side) for key in ("dataset", "eval_dataset")}
    return ["train", file, *flags(changed)], inputs


def assert_trained(log, values, evaluations):
    """The ratio is 1 in every update, or latents are the rollout's, each was evaluated, and each reward was called."""
    # steps drawn for each sample are replayed beside other samples than in the rollout, which moves the last bits
    limit = 1e-5 if values.get("step_selection") == "sample" else 0.0
    names = ("ratio/max_error", "prediction/max_error")
    assert max(entry[name] for entry in log for name in names if name in entry) <= limit
    assert sum("eval_reward" in entry for entry in log) == evaluations
    scored = {key for entry in log for key in entry if re.fullmatch("rewards/.*/mean", key)}
    assert len(scored) == (1 if isinstance(values["reward_funcs"], str) else len(values["reward_funcs"]))


def keep_trainers(monkeypatch):
    """Return a list that the command's trainers are put into."""
    trainers, build = [], cli.train.build_trainer
    monkeypatch.setattr(cli.train, "build_trainer", lambda *args: trainers.append(build(*args)) or trainers[-1])
    return trainers


FILES = [pytest.param(name, marks=() if name in WHOLE else pytest.mark.slow) for name in sorted(STAND_INS)]


@pytest.mark.parametrize("name", FILES)
def test_the_file_runs(name, tmp_path, at_root, monkeypatch):
    trainers, values = keep_trainers(monkeypatch), read_yaml(f"examples/{name}.yaml")
    words, inputs = prepare(name, tmp_path, monkeypatch)
    run = tmp_path / "run"

    assert cli.main(words) == 0
    assert_trained(trainers[0].state.log_history, values, 2 + values.get("eval_on_start", True))
    unbroken = trained(run)
    assert unbroken

    shutil.rmtree(run / "checkpoint-2")
    assert cli.main([*words, "--resume_from_checkpoint=true"]) == 0
    assert_equal(trained(run), unbroken)
    assert_plain_diffusers_loads(trainers[-1], tmp_path / "model", run, inputs)


@pytest.mark.parametrize("name", UPDATED.split())
def test_the_file_trains(name, tmp_path, at_root, monkeypatch):
    """What CI runs of these: an update, with the memory settings of the file."""
    trainers, values = keep_trainers(monkeypatch), read_yaml(f"examples/{name}.yaml")
    words, _ = prepare(name, tmp_path, monkeypatch)
    assert cli.main([*words, "--max_steps=1", "--eval_on_start=false", "--eval_max_prompts=1"]) == 0
    args, log = trainers[0].args, trainers[0].state.log_history
    assert_trained(log, values, 1)
    assert trained(tmp_path / "run")
    memory = ("cache_prompt_embeds", "decode_batch_size", "offload_rewards")
    assert all(getattr(args, key) == values[key] for key in memory if key in values)
    assert args.activation_checkpointing == values.get("gradient_checkpointing", True)
    assert bool(args.quantization) == ("quantization" in values)


def assert_plain_diffusers_loads(trainer, model, run, inputs):
    """A fresh pipeline with what was saved makes what the trainer's makes, and not what the untrained one makes."""
    is_lora = any(run.glob("adapter_config.json")) or (run / "pytorch_lora_weights.safetensors").is_file()
    config, quantised = {}, dict.fromkeys(trainer.args.quantization or (), TorchAoConfig(Int8WeightOnlyConfig()))
    if quantised:
        config = {"quantization_config": PipelineQuantizationConfig(quant_mapping=quantised), "dtype": torch.float32}
    plain = load_plainly(model if is_lora else run, **config)
    if is_lora and trainer.run["loads_by"] == "peft":
        PeftModel.from_pretrained(getattr(plain, trainer.policy.component[0]), run)
    elif is_lora and trainer.run["loads_by"] == "load_lora_adapter":
        plain.transformer.load_lora_adapter(run, prefix=None, weight_name=LORA_WEIGHTS)
    elif is_lora:
        plain.load_lora_weights(run)
        if (run / "transformer_2").is_dir():
            plain.load_lora_weights(run / "transformer_2", load_into_transformer_2=True)
    untrained = load_plainly(model)
    for pipe in (plain, untrained) if trainer.args.scheduler_kwargs else ():  # a LoRA has no scheduler
        config = pipe.scheduler.config | (trainer.args.scheduler_kwargs or {})
        pipe.scheduler = type(pipe.scheduler).from_config(config)
    made = [sample(pipe, inputs) for pipe in (trainer.pipe, plain, untrained)]
    # GLM-Image reads images with other last bits in a pipeline that was loaded, and so does a VAE in other batches
    reads = isinstance(plain, GlmImagePipeline) and "image" in inputs
    limit = 1e-5 if reads or trainer.args.decode_batch_size else 0.0
    assert np.abs(made[0] - made[1]).max() <= limit < np.abs(made[0] - made[2]).max()


def load_plainly(folder, **config):
    """The pipeline in a folder as diffusers loads it; a modular one then gets the classic form of a call."""
    if (folder / "model_index.json").is_file():
        return DiffusionPipeline.from_pretrained(folder, **config)
    pipe = ModularPipeline.from_pretrained(str(folder))
    pipe.load_components(**config)
    return as_pipeline(pipe)


def sample(pipe, inputs):
    """What a pipeline makes by itself, in numbers."""
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), family_of(pipe).bridged(pipe), tiny_pipelines.on_equal_terms(pipe):
        inputs = copy.deepcopy(inputs)  # Z-Image writes into the list of prompts
        inputs |= {"output": pipe.sample_outputs} if isinstance(pipe, ModularPipeline) else {}
        output = pipe(**inputs, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np")
    return np.asarray(extract_samples(pipe, output), dtype=np.float64)


@pytest.mark.parametrize("script", sorted(PYTHON))
def test_the_python_form_says_and_does_the_same(script, tmp_path, at_root, monkeypatch):
    file = f"examples/{PYTHON[script]}.yaml"
    values = read_yaml(file)
    pipe, inputs = tiny_pipelines.build(STAND_INS[PYTHON[script]])
    given = {}

    def config(**settings):
        given["settings"] = settings
        changed = own_settings(small(values, inputs)) | {"max_steps": 1, "eval_on_start": False}
        return DiffusionGRPOConfig(**settings | changed | {"output_dir": str(tmp_path)})

    def trainer(**arguments):
        given.update(arguments)
        given["trainer"] = DiffusionGRPOTrainer(**arguments | {"model": pipe, "peft_config": _small_lora(arguments)})
        return given["trainer"]

    def load_small(source, split="train", prompt_column=None):
        source = shrunk(tmp_path / "data", source, 32) if isinstance(source, str) else source
        return load_prompts(source, split, prompt_column)

    monkeypatch.setattr("diffusion_grpo.data.prompts.load_prompts", load_small)
    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOConfig", config)
    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOTrainer", trainer)
    runpy.run_path(f"examples/{script}.py", run_name="__main__")

    on_cpu = {"bf16": False, "fp16": False, "use_cpu": True}
    arguments, lora, args = parse_train_arguments(file, flags(on_cpu))
    assert DiffusionGRPOConfig(**given["settings"] | on_cpu).to_dict() == args.to_dict()
    assert (given["model"], given["reward_funcs"]) == (arguments.model, values["reward_funcs"])
    assert given["train_dataset"].to_dict() == load_small(arguments.dataset, "train").to_dict()
    held_out = load_small(arguments.eval_dataset, "test").to_dict()
    held_out = {key: values[: arguments.eval_max_prompts] for key, values in held_out.items()}
    assert given["eval_dataset"].to_dict() == held_out
    if lora.use_peft:
        mine, theirs = given["peft_config"], lora.peft_config()
        names = ("r", "lora_alpha", "target_modules", "init_lora_weights")
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
    log = given["trainer"].state.log_history
    assert max(entry["ratio/max_error"] for entry in log if "ratio/max_error" in entry) == 0.0
    assert trained(tmp_path)


def _small_lora(arguments):
    lora = arguments.get("peft_config")
    return lora and type(lora)(r=4, lora_alpha=8, target_modules=lora.target_modules)


def test_the_controlnet_example_runs(tmp_path, at_root, monkeypatch):
    """Put together in Python, so that it has no file of settings: run, resumed, and loaded into plain diffusers."""
    run, trainers, resume = tmp_path / "run", [], []
    pipe, inputs = tiny_pipelines.build("sd15_controlnet")
    sizes = {"height": inputs["height"], "width": inputs["width"]}
    values = {"per_device_train_batch_size": 4, "num_generations": 8, "eval_max_prompts": 2, "num_trained_steps": 9}
    changed = own_settings(small(values, {})) | sizes | {"output_dir": str(run)}

    def trainer(**arguments):
        trainers.append(DiffusionGRPOTrainer(**arguments | {"peft_config": _small_lora(arguments)}))
        return trainers[-1]

    def config(**settings):
        return DiffusionGRPOConfig(**settings | changed | {"resume_from_checkpoint": bool(resume)})

    with monkeypatch.context() as patch:
        patch.setattr(ControlNetModel, "from_pretrained", lambda name: None)
        tiny = lambda name, controlnet, safety_checker: tiny_pipelines.build("sd15_controlnet")[0]  # noqa: E731
        patch.setattr(StableDiffusionControlNetPipeline, "from_pretrained", tiny)
        patch.setattr(diffusion_grpo, "DiffusionGRPOConfig", config)
        patch.setattr(diffusion_grpo, "DiffusionGRPOTrainer", trainer)
        runpy.run_path("examples/sd15_controlnet.py")
        unbroken = trained(run)
        shutil.rmtree(run / "checkpoint-2")
        resume.append(True)
        runpy.run_path("examples/sd15_controlnet.py")
    assert_equal(trained(run), unbroken)
    log = trainers[0].state.log_history
    assert max(entry["ratio/max_error"] for entry in log if "ratio/max_error" in entry) <= 1e-5  # permuted steps
    pipe.save_pretrained(tmp_path / "model")
    assert_plain_diffusers_loads(trainers[-1], tmp_path / "model", run, inputs)
