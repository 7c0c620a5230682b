"""Pipelines that carry LoRAs: trained further, kept, or refused before anything is lost; saved so that they load."""

import json
import shutil

import peft
import pytest
import tiny_pipelines
import torch
from diffusers import DiffusionPipeline
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny_runs import LORA, assert_resumes, finished_run, trained_weights, trainer_for

from diffusion_grpo.rollout.reference import disable_adapters
from diffusion_grpo.weights import files as hub
from diffusion_grpo.weights import lora as adapters
from tests.weights.test_files import draw_sample, draw_with, load_plainly, put_on_hub, save_experts

STRONG = {"learning_rate": 0.02}


def close(one, other):
    return torch.allclose(one, other, atol=1e-5)


@pytest.fixture(scope="module")
def style(tmp_path_factory):
    """The folder of a LoRA, and what the pipeline draws with it."""
    folder = tmp_path_factory.mktemp("style")
    trainer = finished_run(folder, **STRONG)
    trainer.save_model()
    return folder, draw_sample(trainer.pipe, tiny_pipelines.build("sd3")[1])


def with_style(style, name="style"):
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.load_lora_weights(style[0], adapter_name=name)
    return pipe, inputs


def trained(folder, pipe, lora=False, **settings):
    return finished_run(folder, lora=lora, model=pipe, **STRONG | settings)


def test_an_adapter_of_the_pipeline_is_trained_further(tmp_path, style):
    """From where it was: the first samples are the old LoRA's, and the reference stays there."""
    pipe, inputs = with_style(style)
    trainer = trainer_for(tmp_path, lora=False, model=pipe, lora_adapter="style", beta=0.1, **STRONG)
    assert close(draw_sample(pipe, inputs), style[1])
    names = list(trained_weights(trainer))
    assert names and all("lora_" in name and ".style." in name for name in names)
    trainer.train()
    after = draw_sample(trainer.pipe, inputs)
    assert not close(after, style[1])
    with disable_adapters(trainer.model):
        assert close(draw_sample(trainer.pipe, inputs), style[1])
    assert torch.equal(draw_sample(trainer.pipe, inputs), after)
    assert list(trained_weights(trainer)) == names
    trainer.save_model()
    assert close(draw_with(load_plainly, tmp_path), after)
    assert trainer.run["trains_by"] == "LoRA style, trained further"


@pytest.mark.parametrize("layout", ["run", "peft"])
def test_a_saved_lora_is_trained_further(tmp_path, style, layout):
    folder, drawn = style
    if layout == "peft":
        (folder := tmp_path / "peft").mkdir()
        for name in (hub.ADAPTER_WEIGHTS, hub.ADAPTER_CONFIG):
            shutil.copy(style[0] / name, folder)
    trainer = trainer_for(tmp_path / "run", lora=False, lora_path=str(folder), **STRONG)
    _, inputs = tiny_pipelines.build("sd3")
    assert close(draw_sample(trainer.pipe, inputs), drawn)
    assert trainer.model.peft_config["default"].r == LORA["r"]
    assert trainer.run["trains_by"] == f"LoRA {folder.name}, trained further"
    assert str(folder) not in json.dumps(trainer.run)
    trainer.train()
    trainer.save_model()
    found = draw_with(hub.load_weights, tmp_path / "run")
    assert close(found, draw_sample(trainer.pipe, inputs)) and not close(found, drawn)


def test_a_lora_on_the_hub_is_trained_further(tmp_path, style, monkeypatch):
    """In PEFT's layout alone."""
    put_on_hub(monkeypatch, pushed := tmp_path / "pushed", tmp_path / "cache")
    shutil.copytree(style[0], pushed)
    (pushed / hub.LORA_WEIGHTS).unlink()
    trainer = trainer_for(tmp_path / "run", lora=False, lora_path="me/style", **STRONG)
    assert close(draw_sample(trainer.pipe, tiny_pipelines.build("sd3")[1]), style[1])
    assert trainer.run["trains_by"] == "LoRA me/style, trained further"


def test_a_run_that_trains_a_lora_further_resumes_exactly(tmp_path, style):
    settings = STRONG | {"lora": False, "lora_path": str(style[0]), "save_strategy": "steps", "save_steps": 1}
    settings |= {"beta": 0.1, "max_steps": 3}
    assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 1)


def test_other_adapters_stay_active_and_frozen(tmp_path, style):
    pipe, inputs = with_style(style)
    pipe.set_adapters("style", 0.5)
    half = draw_sample(pipe, inputs)
    trainer = trainer_for(tmp_path, model=pipe, keep_adapters=True, beta=0.1, max_steps=2, **STRONG)
    assert close(draw_sample(pipe, inputs), half)  # a new LoRA begins with zeros
    own = {name: value.clone() for name, value in pipe.transformer.named_parameters() if ".style." in name}
    assert own and not any(".style." in name for name in trained_weights(trainer))
    trainer.train()
    after = draw_sample(pipe, inputs)
    assert not close(after, half)
    with disable_adapters(trainer.model):
        assert close(draw_sample(pipe, inputs), half)
    kept = {name: value for name, value in pipe.transformer.named_parameters() if ".style." in name}
    assert all(torch.equal(value, own[name]) and not value.requires_grad for name, value in kept.items())
    trainer.save_model()
    fresh, _ = with_style(style)
    fresh.load_lora_weights(tmp_path, adapter_name="new")
    fresh.set_adapters(["style", "new"], [0.5, 1.0])
    assert close(draw_sample(fresh, inputs), after)
    assert "adapters that this folder does not contain: `style` (transformer)" in (tmp_path / "README.md").read_text()


def test_a_second_trainer_on_the_same_pipeline(tmp_path):
    """A notebook's cell, run twice: refused before the first one's LoRA is touched; then trained further, or kept."""
    first = finished_run(tmp_path / "first", **STRONG)
    pipe, (_, inputs) = first.pipe, tiny_pipelines.build("sd3")
    drawn = draw_sample(pipe, inputs)
    with pytest.raises(ValueError, match="lora_adapter='default'"):
        trainer_for(tmp_path / "second", model=pipe)
    with pytest.raises(ValueError, match="merge it"):
        trainer_for(tmp_path / "second", model=pipe, lora=False)
    assert torch.equal(draw_sample(pipe, inputs), drawn)
    second = trainer_for(tmp_path / "second", model=pipe, lora=False, lora_adapter="default", **STRONG)
    assert torch.equal(draw_sample(pipe, inputs), drawn)
    second.train()
    third = trainer_for(tmp_path / "third", model=pipe, lora=False, lora_adapter="default", **STRONG)
    drawn = draw_sample(pipe, inputs)
    with disable_adapters(third.model):
        assert torch.equal(draw_sample(pipe, inputs), drawn)
    fourth = trainer_for(tmp_path / "fourth", model=pipe, keep_adapters=True, **STRONG)
    assert torch.equal(draw_sample(pipe, inputs), drawn) and fourth.model.active_adapter == "default_2"
    fourth.train()
    with disable_adapters(fourth.model):
        assert torch.equal(draw_sample(pipe, inputs), drawn)
    assert not close(draw_sample(pipe, inputs), drawn)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_the_whole_pipeline_is_saved_with_the_lora_in_its_weights(tmp_path, name):
    trainer = finished_run(tmp_path / "run", name=name, **STRONG)
    _, inputs = tiny_pipelines.build(name)
    drawn = draw_sample(trainer.pipe, inputs)
    trainer.pipe.save_pretrained(tmp_path / "whole")
    assert torch.equal(draw_sample(trainer.pipe, inputs), drawn)
    whole = DiffusionPipeline.from_pretrained(tmp_path / "whole")
    whole.set_progress_bar_config(disable=True)
    assert close(draw_sample(whole, inputs), drawn)
    assert not close(draw_sample(tiny_pipelines.build(name)[0], inputs), drawn)
    assert not [key for key in whole.components if hasattr(getattr(whole, key), "peft_config")]


def test_a_peft_model_as_the_network(tmp_path):
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.transformer = get_peft_model(pipe.transformer, LoraConfig(**LORA, init_lora_weights="gaussian"))
    with pytest.raises(ValueError, match="lora_adapter='default'"):
        trainer_for(tmp_path, model=pipe)
    trainer = trained(tmp_path, pipe, lora_adapter="default")
    assert type(trainer.pipe.transformer).__name__ == "SD3Transformer2DModel"
    trainer.save_model()
    assert close(draw_with(load_plainly, tmp_path), draw_sample(trainer.pipe, inputs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_adapter": "other", "lora": False}, "has no LoRA 'other'; it has style"),
        ({"lora_path": "x/y", "lora_adapter": "style", "lora": False}, "leave one of them out"),
        (
            {"lora_adapter": "style"},
            "lora_adapter names a LoRA that has its own rank and layers; leave out peft_config",
        ),
        ({"lora_path": "./nowhere", "lora": False}, "lora_path: there is no folder or file ./nowhere"),
        ({"scale": 0.5, "lora_adapter": "style", "lora": False}, r"is scaled by 0.5.*set_adapters\('style', 1.0\)"),
        ({"fused": True, "keep_adapters": True}, "both fused into its weights and loaded; call pipe.unload_lora"),
    ],
)
def test_what_is_refused_of_adapters(tmp_path, style, settings, message):
    pipe, inputs = with_style(style)
    settings = dict(settings)
    if scale := settings.pop("scale", None):
        pipe.set_adapters("style", scale)
    if settings.pop("fused", False):
        pipe.fuse_lora()
    before = draw_sample(pipe, inputs)
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, model=pipe, **settings)
    assert torch.equal(draw_sample(pipe, inputs), before)


@pytest.mark.skipif(Version(peft.__version__) < Version("0.20"), reason="transformers needs PEFT 0.20")
def test_a_lora_of_text_encoders_too(tmp_path):
    """What would be missing beside the saved LoRA is refused, or kept on request."""
    pipe, _ = tiny_pipelines.build("sd15")
    pipe.text_encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"), "style")
    with pytest.raises(ValueError, match="pipe.text_encoder.*keep_adapters"):
        trainer_for(tmp_path, name="sd15", model=pipe)
    trainer = trainer_for(tmp_path, name="sd15", model=pipe, keep_adapters=True)
    assert trainer.run["kept_adapters"] == {"text_encoder": ["style"]}


@pytest.mark.parametrize(
    ("component", "words"), [("transformer_2", "also has a LoRA for transformer,"), ("vae", "holds no LoRA for vae;")]
)
def test_a_lora_of_other_networks_than_the_trained_ones_is_refused(tmp_path, component, words):
    save_experts(tmp_path)
    (tmp_path / "run.json").write_text('{"component": "transformer, transformer_2"}')
    with pytest.raises(ValueError, match=f"lora_path: .* {words}"):
        adapters.load_lora(tiny_pipelines.build("wan_experts")[0], (component,), str(tmp_path), keep_adapters=False)


# Targets


def test_a_config_without_targets_takes_the_networks_usual_ones():
    pipe, language = (tiny_pipelines.build(name)[0] for name in ("sd3", "glm_image"))
    config = adapters.fill_targets(pipe.transformer, LoraConfig(r=2))
    assert set(config.target_modules) == {"to_q", "to_k", "to_v", "to_out.0"}
    config = adapters.fill_targets(language.vision_language_encoder, LoraConfig(r=2))
    assert set(config.target_modules) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ValueError, match="none of the usual attention layers; set target_modules.*0"):
        adapters.fill_targets(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(r=2))


def test_one_target_may_be_written_without_a_list():
    network = tiny_pipelines.build("sd3")[0].transformer
    target = lambda given: adapters.fill_targets(network, LoraConfig(r=2, target_modules=given)).target_modules  # noqa: E731
    assert target("to_q") == {"to_q"} and target("to_out.0") == {"to_out.0"}
    assert target(r".*attn\.to_q") == r".*attn\.to_q" and target("proj_out") == "proj_out"  # a module's whole name
    missing = "SD3Transformer2DModel has no module"
    for wrong, words in (
        (["to_q", "q_lin"], rf"{missing} q_lin; choose from .*to_k, to_out.0, to_q"),
        (r"q_lin\..*", rf"{missing} q_lin\\\.\.\*"),
        ("to_q, to_k", f"{missing} to_q, to_k"),
        ("*to_q", "no regular expression"),
    ):
        with pytest.raises(ValueError, match=words):
            target(wrong)


def test_both_parts_of_glm_image_at_once(tmp_path):
    with pytest.raises(ValueError, match="tokens of vision_language_encoder and denoising steps cannot.*one of them"):
        trainer_for(tmp_path, name="glm_image", train_component="transformer, vision_language_encoder")
