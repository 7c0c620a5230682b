"""The code on a model card: it loads the weights, and calls the pipeline as evaluations did."""

import pytest
import tiny_pipelines
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from PIL import Image
from tiny_runs import are_equal, finished_run, trainer_for

from diffusion_grpo.report.usage import write_usage
from diffusion_grpo.weights.files import name_half_dtype

RUN = {
    "model": "a/b",
    "trains_by": "LoRA rank 4",
    "pipeline": "SomePipeline",
    "component": "transformer",
    "loads_by": "load_lora_weights",
    "settings": {},
    "evaluation_call": {"inputs": ["prompt"], "arguments": {"num_inference_steps": 4}},
}


def run_usage(folder, monkeypatch):
    """Run the code of a run's card beside its folder; return what it named, and the code."""
    monkeypatch.chdir(folder.parent)
    load = DiffusionPipeline.from_pretrained

    def load_quietly(*args, **kwargs):
        pipe = load(*args, **kwargs)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", load_quietly)
    code = (folder / "README.md").read_text().split("```python\n")[1].split("\n```")[0]
    exec(code, names := {})
    return names, code


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_code_of_a_half_precision_run_loads_it_and_samples_as_the_evaluations_did(tmp_path, monkeypatch, lora):
    base, inputs = tiny_pipelines.build("sd3")
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    sizes = {"height": 2 * inputs["height"], "width": inputs["width"]}  # another height than the pipeline's own
    own = {"max_steps": 1, "bf16": True, "eval_num_inference_steps": 3, "scheduler_kwargs": {"shift": 5.0}}
    own |= {"guidance_scale": 1.5, "pipeline_kwargs": {"max_sequence_length": 8}}
    columns = {"hint": ["for the reward"] * 4}
    trainer = trainer_for(tmp_path / "run", model=str(tmp_path / "base"), lora=lora, columns=columns, **sizes, **own)
    assert name_half_dtype(trainer.pipe) == "bfloat16"
    trainer.train()
    trainer.save_model()
    with torch.autocast("cpu", torch.bfloat16):
        assert len(trainer.pipe(**inputs | {"prompt": "a cat"}, num_inference_steps=1).images) == 1
    names, code = run_usage(tmp_path / "run", monkeypatch)
    assert f'from_pretrained("{"base" if lora else "run"}", dtype=torch.bfloat16)' in code
    pipe, sample = names["pipe"], names["sample"]
    assert pipe.scheduler.config.shift == 5.0 and base.scheduler.config.shift != 5.0
    assert isinstance(sample, Image.Image) and sample.size == (sizes["width"], sizes["height"])
    assert len(pipe.scheduler.timesteps) == 3 and pipe.guidance_scale == 1.5


def test_the_code_of_a_full_run_that_is_still_going_on_loads_its_checkpoint(tmp_path, monkeypatch):
    """Each save is pushed with its card, but only the last one holds the whole pipeline."""
    tiny_pipelines.build("sd3")[0].to(torch.float16).save_pretrained(tmp_path / "base")
    own = {"max_steps": 1, "save_steps": 1, "save_strategy": "steps", "scheduler_kwargs": {"shift": 5.0}}
    trainer = finished_run(tmp_path / "run", model=str(tmp_path / "base"), lora=False, **own)
    trainer.checkpointer.copy_weights(tmp_path / "run/checkpoint-1", tmp_path / "run")
    trainer.create_model_card()
    names, code = run_usage(tmp_path / "run", monkeypatch)
    line = 'pipe.transformer = pipe.transformer.from_pretrained("run", subfolder="transformer", dtype=torch.float32)'
    assert line in code
    loaded, trained = names["pipe"].transformer.state_dict(), trainer.pipe.transformer.state_dict()
    assert are_equal(loaded, trained)
    assert isinstance(names["sample"], Image.Image) and names["pipe"].scheduler.config.shift == 5.0
    trainer.save_model()
    code = run_usage(tmp_path / "run", monkeypatch)[1]
    assert 'pipe = DiffusionPipeline.from_pretrained("run")\n' in code and "subfolder" not in code


def test_the_code_calls_a_pipeline_whose_first_parameter_is_an_image(tmp_path, monkeypatch):
    tiny_pipelines.build("flux_kontext")[0].save_pretrained(tmp_path / "base")
    image, call = Image.new("RGB", (16, 16), "red"), {"max_area": 256, "_auto_resize": False, "max_sequence_length": 8}
    held_out = Dataset.from_dict({"prompt": ["a cat"], "image": [image]})
    settings = {"model": str(tmp_path / "base"), "max_steps": 1, "columns": {"image": [image] * 4}}
    trainer = finished_run(tmp_path / "run", "flux_kontext", pipeline_kwargs=call, eval_dataset=held_out, **settings)
    trainer.save_model()
    card = tmp_path / "run" / "README.md"
    assert "image=..." in card.read_text()
    card.write_text(card.read_text().replace("image=...", "image=picture"))
    monkeypatch.setattr("builtins.picture", image, raising=False)
    assert isinstance(run_usage(tmp_path / "run", monkeypatch)[0]["sample"], Image.Image)


def write(**changes):
    return write_usage(RUN | changes, "me/run", None, is_on_hub=True)


def test_a_pipeline_that_was_built_in_memory_is_not_given_a_name():
    code = write(model="WanPipeline", pipeline="WanPipeline")
    assert "pipe = ...  # the pipeline that was trained\n" in code and "DiffusionPipeline.from_pretrained" not in code


def test_the_base_model_is_loaded_as_it_was_trained():
    settings = {"model_init_kwargs": {"revision": "abc", "variant": "fp16", "token": "..."}, "bf16": True}
    settings |= {"scheduler_kwargs": {"shift": 3.0, "use_dynamic_shifting": False}}
    code = write(settings=settings)
    assert 'from_pretrained("a/b", revision="abc", variant="fp16", dtype=torch.bfloat16)' in code
    assert "from_config(pipe.scheduler.config, shift=3.0, use_dynamic_shifting=False)  # as in training\n" in code
    code = write(settings=settings, trains_by="full")  # the run's own weights have no such versions
    assert 'from_pretrained("me/run", dtype=torch.bfloat16)' in code and "scheduler" not in code


def test_the_dtype_in_which_the_code_loads():
    assert 'from_pretrained("a/b", dtype=torch.float32)' in write()  # its text encoders may be saved in half precision
    for same in ({"model": "tiny"}, {"trains_by": "full"}):
        assert "dtype=" not in write(**same) and "import torch" not in write(**same)
    assert 'from_pretrained("a/b", dtype=torch.float16)' in write(settings={"fp16": True})
    assert 'from_pretrained("a/b", dtype=torch.bfloat16)' in write(dtype="bfloat16")  # where bf16 is the default
    assert "dtype=torch.float32" in write(dtype=None)
    assert name_half_dtype(tiny_pipelines.build("sd3")[0]) is None


def test_the_lora_of_a_second_expert_is_put_into_it():
    for component, expected in (("transformer", ""), ("transformer_2", ", load_into_transformer_2=True")):
        assert f'pipe.load_lora_weights("me/run"{expected})' in write(component=component).splitlines()
