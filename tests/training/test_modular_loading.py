"""Modular pipelines by name: loaded, trained, resumed, saved, and loaded again by plain diffusers."""

import json
import re
import shutil
from collections import Counter

import pytest
import tiny_pipelines
import torch
from diffusers import ModularPipeline
from tiny_runs import are_equal, finished_run, logged, trained_weights, trainer_for

from diffusion_grpo.policy.drivers import UnsupportedPipeline

SD3 = {"pipeline_kwargs": {"max_sequence_length": 32, "negative_prompt": ""}, "max_steps": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of a pipeline by its name."""
    made = {}

    def write(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            tiny_pipelines.build(name)[0].save_pretrained(str(made[name]), overwrite_modular_index=True)
        return str(made[name])

    return write


def sample(pipe, inputs):
    call = {k: v for k, v in inputs.items() if k != "guidance_scale"} | {"num_inference_steps": 2, "output_type": "pt"}
    return pipe(**call, generator=torch.Generator().manual_seed(0), output="images")


def load(folder):
    pipe = ModularPipeline.from_pretrained(str(folder))
    pipe.load_components(dtype=torch.float32)
    return pipe


def test_a_lora_resumes_and_loads_in_plain_diffusers(folders, tmp_path):
    model = folders("modular_sd3")
    whole = finished_run(tmp_path / "run", model=model, save_strategy="steps", save_steps=2, **SD3)
    assert logged(whole, "ratio/max_error") == [0.0] * 3
    shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoint-3")
    resumed = trainer_for(tmp_path / "half", model=model, save_strategy="steps", save_steps=2, **SD3)
    resumed.train(resume_from_checkpoint=True)
    assert are_equal(trained_weights(resumed), trained_weights(whole))

    whole.save_model()
    inputs = tiny_pipelines.build("modular_sd3")[1]
    plain = load(model)
    before = sample(plain, inputs)
    plain.load_lora_weights(tmp_path / "run")
    after = sample(plain, inputs)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, sample(whole.pipe, inputs), rtol=0, atol=1e-5)

    code = re.search(r"```python\n(.*?)```", (tmp_path / "run" / "README.md").read_text(), re.DOTALL)[1]
    code = code.replace('"modular_sd3"', json.dumps(model)).replace('"run"', json.dumps(str(tmp_path / "run")))
    made = {}
    exec(code, made)
    assert made["sample"].size == (16, 16) and made["pipe"].guider.guidance_scale == 4.5


def test_full_training_of_flux3_saves_a_whole_pipeline(folders, tmp_path):
    trainer = finished_run(tmp_path / "run", "flux3", lora=False, model=folders("flux3"), max_steps=1)
    trainer.save_model()
    assert str(tmp_path) not in (tmp_path / "run" / "modular_model_index.json").read_text()
    saved, trained = load(tmp_path / "run").transformer, trainer.pipe.transformer
    before = load(folders("flux3")).transformer.state_dict()
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in saved.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in saved.state_dict().items())


def test_prompts_are_encoded_once(tmp_path):
    weights, texts = [], []
    for kind in ("off", "memory"):
        pipe, _ = tiny_pipelines.build("flux3")
        texts.clear()
        pipe.text_encoder.register_forward_hook(lambda _, words, given, output: texts.append(given), with_kwargs=True)
        trainer = finished_run(tmp_path / kind, "flux3", model=pipe, max_steps=1, cache_prompt_embeds=kind)
        weights.append(trained_weights(trainer))
    assert are_equal(weights[0], weights[1])
    times = Counter(tuple(given["input_ids"].flatten().tolist()) for given in texts)
    assert sorted(times.values()) == [1] * 6 + [6]  # the negative prompt is encoded beside each


def test_a_quantised_base_trains_the_same_with_its_frozen_parts_offloaded(folders, tmp_path):
    weights = []
    for place in (None, "cpu"):
        own = {"quantization": {"transformer": "torchao", "text_encoder_3": "torchao"}, "offload_frozen": place}
        trainer = finished_run(tmp_path / str(place), model=folders("modular_sd3"), **SD3 | own | {"max_steps": 1})
        assert trainer.pipe.transformer.hf_quantizer and trainer.pipe.text_encoder_3.hf_quantizer
        assert bool(trainer.learner.offload) == (place == "cpu") and logged(trainer, "ratio/max_error") == [0.0]
        weights.append(trained_weights(trainer))
    assert are_equal(weights[0], weights[1])
    assert max(value.abs().max() for name, value in weights[0].items() if "lora_B" in name) > 1e-4  # from 0


def test_a_component_that_is_not_there_is_one_sentence_with_the_reason(folders, tmp_path, caplog):
    shutil.copytree(folders("modular_sd3"), tmp_path / "model", ignore=lambda *_: ["vae"])
    path = tmp_path / "model" / "modular_model_index.json"
    index = json.loads(path.read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(tmp_path / "gone")
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="vae of .* could not be loaded: Unable to load vae .*gone"):
        trainer_for(tmp_path / "run", model=str(tmp_path / "model"), **SD3)
    assert "Traceback" not in caplog.text


def test_what_cannot_be_loaded_is_refused(folders, tmp_path):
    pipe, _ = tiny_pipelines.build("modular_sd3")
    bare = ModularPipeline.from_pretrained(folders("modular_sd3"))
    with pytest.raises(ValueError, match="load_components"):
        trainer_for(tmp_path / "run", model=bare, **SD3)

    with pytest.raises(UnsupportedPipeline, match="guider"):
        trainer_for(tmp_path / "run", model=folders("modular_sd3"), model_init_kwargs={"guider": None}, **SD3)

    pipe.update_components(transformer=None)
    with pytest.raises(ValueError, match="transformer"):
        trainer_for(tmp_path / "run", model=pipe, **SD3)
