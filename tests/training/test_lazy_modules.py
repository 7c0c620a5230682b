"""Text encoders leave memory, are themselves again when something calls them, and are told from others."""

import gc
import weakref

import diffusers
import pytest
import tiny_pipelines
import torch
from transformers import CLIPTextModelWithProjection, PreTrainedModel

from diffusion_grpo.config.settings import DiffusionGRPOConfig
from diffusion_grpo.training.lazy_modules import (
    LazyModule,
    find_lazy_modules,
    free_encoders,
    is_lazy,
    is_plain,
    list_text_encoders,
    restore_encoders,
)
from diffusion_grpo.training.offload import FrozenOffload
from diffusion_grpo.training.prompt_embeds import identify_encoders, identify_pipeline, identify_source

NAMES = ["text_encoder", "text_encoder_2", "text_encoder_3"]


def fresh(name):
    return getattr(tiny_pipelines.build("sd3")[0], name)


def lazy_pipe():
    """A pipeline whose encoders are not loaded yet, as of a named model."""
    pipe, _ = tiny_pipelines.build("sd3")
    for name in NAMES:
        part = getattr(pipe, name)
        setattr(pipe, name, LazyModule(type(part), part.config, part.dtype))
        getattr(pipe, name).connect(lambda name=name: fresh(name))
    return pipe


def freed_pipe():
    """A pipeline that was given with its encoders, which wait in CPU memory."""
    pipe, _ = tiny_pipelines.build("sd3")
    assert free_encoders(pipe) == NAMES
    return pipe


def encode(pipe, prompt="a cat"):
    with torch.no_grad():
        return pipe.encode_prompt(prompt, prompt, prompt)


def list_loaded(pipe):
    return [name for name, part in find_lazy_modules(pipe).items() if part.is_loaded]


def test_a_lazy_module_has_no_weights_and_looks_the_same():
    pipe, _ = tiny_pipelines.build("sd3")
    assert list_text_encoders(pipe.components) == NAMES
    config = pipe.text_encoder.config
    part = LazyModule(CLIPTextModelWithProjection, config, torch.bfloat16)
    assert isinstance(part, PreTrainedModel) and part.__class__ is CLIPTextModelWithProjection and is_lazy(part)
    assert part.config is config and part.dtype == torch.bfloat16 and part.device == torch.device("cpu")
    pipe.text_encoder = part
    assert pipe.config["text_encoder"] == ("transformers", "CLIPTextModelWithProjection")
    pipe.to("meta")
    assert part.device.type == "meta" and not list(part.parameters())
    assert not hasattr(part, "_hf_hook") and not hasattr(part, "is_loaded_in_8bit")


@pytest.mark.parametrize("make", [lazy_pipe, freed_pipe])
def test_encoders_load_when_they_are_called_and_can_be_freed_again(make):
    expected, pipe = encode(tiny_pipelines.build("sd3")[0]), make()
    for _ in range(2):
        assert list_loaded(pipe) == []
        assert all(map(torch.allclose, encode(pipe), expected))
        assert list_loaded(pipe) == NAMES
        free_encoders(pipe)
    pipe.text_encoder.text_model(torch.zeros(1, 4, dtype=torch.int64))  # some pipelines call a part of it
    assert list_loaded(pipe) == NAMES[:1]
    assert not pipe.text_encoder.training and not any(p.requires_grad for p in pipe.text_encoder.parameters())


def test_a_given_pipeline_gets_its_own_encoders_back():
    pipe, _ = tiny_pipelines.build("sd3")
    parts = [getattr(pipe, name) for name in NAMES]
    for _ in range(2):
        free_encoders(pipe)
    restore_encoders(pipe)
    assert [getattr(pipe, name) for name in NAMES] == parts and find_lazy_modules(pipe) == {}


@pytest.mark.parametrize("make", [lazy_pipe, freed_pipe])
def test_encoders_come_back_in_the_dtype_that_the_pipeline_was_cast_to(make):
    pipe = make()
    for dtype in (torch.bfloat16, torch.float32):
        pipe.to(dtype)
        assert pipe.text_encoder.dtype == pipe.text_encoder_3.dtype == dtype
        for _ in range(2):  # what was cast while it was away, and what was cast before it went
            assert encode(pipe)[0].dtype == dtype
            assert {weight.dtype for name in NAMES for weight in getattr(pipe, name).parameters()} == {dtype}
            free_encoders(pipe)


@pytest.mark.parametrize("make", [lazy_pipe, freed_pipe])
def test_encoders_are_saved_without_the_accelerator(make, tmp_path):
    """Saving all of them there would need the memory that freeing them has made."""
    pipe = make()
    for name in NAMES:
        getattr(pipe, name).to("meta")  # weights that are moved there are lost
    pipe.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert list_loaded(pipe) == []
    assert len(list((tmp_path / "saved/text_encoder").glob("*.safetensors"))) > 1
    saved = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "saved")
    for name in NAMES:
        written, expected = getattr(saved, name).state_dict(), fresh(name).state_dict()
        assert written.keys() == expected.keys() and all(torch.equal(written[k], v) for k, v in expected.items())


def test_encoders_are_freed_at_once_although_hooks_refer_to_them():
    """`offload_frozen` makes cycles of references, and Python's own collection may come much later."""
    pipe = lazy_pipe()
    FrozenOffload(pipe, [pipe.transformer], "cpu:0")
    gc.disable()
    try:
        encode(pipe)
        freed = [weakref.ref(getattr(pipe, name).load()) for name in NAMES]
        assert all(part() is not None for part in freed)
        free_encoders(pipe)
        assert [part() for part in freed] == [None] * 3
    finally:
        gc.enable()


def test_quantised_encoders_of_a_given_pipeline_stay():
    class Quantised(torch.nn.Parameter):
        pass

    pipe, _ = tiny_pipelines.build("sd15")
    part = pipe.text_encoder.get_input_embeddings()
    part.weight = Quantised(part.weight.data)
    assert not is_plain(pipe.text_encoder)
    assert free_encoders(pipe) == [] and not is_lazy(pipe.text_encoder)


def test_models_are_told_apart(tmp_path):
    one, same, other = (tiny_pipelines.build("sd3", seed)[0] for seed in (0, 0, 1))
    assert identify_pipeline(one) == identify_pipeline(same) != identify_pipeline(other)
    one.save_pretrained(tmp_path / "one")
    found = identify_source(tmp_path / "one")
    config = tmp_path / "one/tokenizer/tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    assert identify_source(tmp_path / "one") != found
    names = set()
    eight = {"quantization": {"text_encoder_3": "torchao"}}
    for settings in ({}, {"model_init_kwargs": {"torch_dtype": "bfloat16"}}, eight):
        args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True, **settings)
        names.add(identify_encoders(one, str(tmp_path / "one"), args))
    assert len(names) == 3 and all(name.startswith("StableDiffusion3Pipeline-") for name in names)
