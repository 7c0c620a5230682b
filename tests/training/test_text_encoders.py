"""Text encoders leave memory, are themselves again when something calls them, and are told from others."""

import gc
import os
import weakref

import diffusers
import pytest
import tiny_pipelines
import torch
from transformers import CLIPTextModelWithProjection, PreTrainedModel

from diffusion_grpo.config.settings import DiffusionGRPOConfig
from diffusion_grpo.training import text_encoders
from diffusion_grpo.training.offload import FrozenOffload
from diffusion_grpo.training.text_encoders import (
    StandIn,
    TextEncoders,
    describe_versions,
    identify_encoders,
    identify_pipeline,
    identify_source,
    is_plain,
    list_text_encoders,
    make_stand_ins,
    remember_calls,
    wake_encoders,
)

NAMES = ["text_encoder", "text_encoder_2", "text_encoder_3"]


def held(pipe, tmp_path, reload=None):
    return TextEncoders(pipe, reload, tmp_path / "folder", torch.device("cpu"))


def test_what_stands_in_has_no_weights_and_looks_the_same():
    pipe, _ = tiny_pipelines.build("sd3")
    assert list_text_encoders(pipe.components) == NAMES
    config = pipe.text_encoder.config
    part = StandIn(CLIPTextModelWithProjection, config, torch.bfloat16, "cpu", *[lambda: pytest.fail("was woken")] * 2)
    assert isinstance(part, PreTrainedModel) and part.__class__ is CLIPTextModelWithProjection
    assert part.config is config and part.dtype == torch.bfloat16 and part.device == torch.device("cpu")
    pipe.text_encoder = part
    assert pipe.config["text_encoder"] == ("transformers", "CLIPTextModelWithProjection")
    pipe.to("meta")
    assert part.device.type == "meta" and not list(part.parameters())
    assert not hasattr(part, "_hf_hook") and not hasattr(part, "is_loaded_in_8bit")


def test_a_given_pipeline_gets_its_own_encoders_back(tmp_path):
    pipe, inputs = tiny_pipelines.build("sd3")
    weights = {name: {k: v.clone() for k, v in getattr(pipe, name).state_dict().items()} for name in NAMES}
    parts = {name: getattr(pipe, name) for name in NAMES}
    with torch.no_grad():
        expected = pipe.encode_prompt("a cat", "a cat", "a cat")
    encoders = held(pipe, tmp_path)
    with encoders.working():
        pass
    assert encoders.released == NAMES
    assert all(weight.numel() == 0 for part in parts.values() for weight in part.parameters())
    with torch.no_grad():
        found = pipe.encode_prompt("a cat", "a cat", "a cat")
    assert all(map(torch.allclose, found, expected)) and encoders.released == [] and encoders.loads == 3
    assert all(getattr(pipe, name) is part for name, part in parts.items())
    for name in NAMES:
        now = getattr(pipe, name).state_dict()
        assert now.keys() == weights[name].keys() and all(torch.equal(now[k], v) for k, v in weights[name].items())
    encoders.release()
    encoders.release()
    pipe.save_pretrained(tmp_path / "saved")
    assert encoders.released == NAMES and all(weight.numel() == 0 for weight in parts[NAMES[0]].parameters())
    wake_encoders(pipe)
    saved = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(saved.text_encoder.parameters(), pipe.text_encoder.parameters()))


def test_encoders_of_a_named_model_are_freed_and_loaded_anew(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    fresh = lambda name: getattr(tiny_pipelines.build("sd3")[0], name)  # noqa: E731
    freed = [weakref.ref(getattr(pipe, name)) for name in NAMES]
    encoders = held(pipe, tmp_path, reload=fresh)
    with encoders.working(), encoders.watch() as has_run, torch.no_grad():
        first = pipe.encode_prompt("a cat", "a cat", "a cat")[0]
    assert has_run == [True] and encoders.released == NAMES
    gc.collect()
    assert [part() for part in freed] == [None] * 3
    with encoders.watch() as has_run, torch.no_grad():
        assert torch.equal(pipe.encode_prompt("a cat", "a cat", "a cat")[0], first)
    assert has_run == [True] and encoders.loads == 3 and not list((tmp_path).rglob("*.safetensors"))
    encoders.release()
    with encoders.watch() as has_run, torch.no_grad():
        pipe.text_encoder.text_model(torch.zeros(1, 4, dtype=torch.int64))  # some pipelines call a part of it
    assert has_run == [True] and encoders.loads == 4
    assert not pipe.text_encoder.training and not any(p.requires_grad for p in pipe.text_encoder.parameters())


def test_a_second_run_gets_back_what_the_first_released(tmp_path):
    """Also beside the first one, whose files it must not need any more."""
    pipe, _ = tiny_pipelines.build("sd3")
    parts = [getattr(pipe, name) for name in NAMES]
    weights = [weight.clone() for part in parts for weight in part.parameters()]
    for run in ("first", "second"):
        wake_encoders(pipe)
        encoders = held(pipe, tmp_path / run)
        assert encoders.released == []
        encoders.release()
        assert encoders.released == NAMES
    held(pipe, tmp_path / "third")  # whoever looks at the pipeline leaves in place what brings its encoders back
    wake_encoders(pipe)
    assert [getattr(pipe, name) for name in NAMES] == parts
    assert all(map(torch.equal, weights, (weight for part in parts for weight in part.parameters())))


@pytest.mark.parametrize("is_named", [False, True])
def test_encoders_come_back_in_the_dtype_that_the_pipeline_was_cast_to(tmp_path, is_named):
    fresh = lambda name: getattr(tiny_pipelines.build("sd3")[0], name)  # noqa: E731
    pipe, _ = tiny_pipelines.build("sd3")
    encoders = held(pipe, tmp_path, reload=fresh if is_named else None)
    for dtype in (torch.bfloat16, torch.float32):
        encoders.release()
        pipe.to(dtype)
        assert pipe.text_encoder.dtype == pipe.text_encoder_3.dtype == dtype
        wake_encoders(pipe)
        encoders.release()  # what was cast while it was away, and what was cast before it went
        wake_encoders(pipe)
        assert {weight.dtype for name in NAMES for weight in getattr(pipe, name).parameters()} == {dtype}
    with torch.no_grad():
        assert pipe.encode_prompt("a cat", "a cat", "a cat")[0].dtype == torch.float32


@pytest.mark.parametrize("is_named", [False, True])
def test_encoders_are_saved_without_the_accelerator(tmp_path, is_named):
    """Saving all of them there would need the memory that releasing them has freed."""
    fresh = lambda name: getattr(tiny_pipelines.build("sd3")[0], name)  # noqa: E731
    pipe, _ = tiny_pipelines.build("sd3")
    encoders = held(pipe, tmp_path, reload=fresh if is_named else None)
    encoders.release()
    stand_ins = [getattr(pipe, name).to("meta") for name in NAMES]  # weights that are moved there are lost
    pipe.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert [getattr(pipe, name) for name in NAMES] == stand_ins and encoders.released == NAMES
    assert {part.device.type for part in stand_ins} == {"meta"}
    assert len(list((tmp_path / "saved/text_encoder").glob("*.safetensors"))) > 1
    saved = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "saved")
    for name in NAMES:
        written, expected = getattr(saved, name).state_dict(), fresh(name).state_dict()
        assert written.keys() == expected.keys() and all(torch.equal(written[k], v) for k, v in expected.items())
        getattr(pipe, name).to_empty(device="cpu")
    with torch.no_grad():
        found, expected = (made.encode_prompt("a cat", "a cat", "a cat") for made in (pipe, saved))
    assert all(map(torch.equal, found[:1], expected[:1])) and encoders.released == []


def test_encoders_are_freed_at_once_although_hooks_refer_to_them(tmp_path):
    """`offload_frozen` makes cycles of references, and Python's own collection may come much later."""
    pipe, _ = tiny_pipelines.build("sd3")
    fresh = lambda name: getattr(tiny_pipelines.build("sd3")[0], name)  # noqa: E731
    encoders = held(pipe, tmp_path, reload=fresh)
    encoders.release()
    FrozenOffload(pipe, [pipe.transformer], "cpu:0")
    gc.disable()
    try:
        with encoders.watch(), torch.no_grad():
            pipe.encode_prompt("a cat", "a cat", "a cat")  # in a rollout
        freed = [weakref.ref(getattr(pipe, name)) for name in NAMES]
        with encoders.working(), encoders.watch(), torch.no_grad():
            pipe.encode_prompt("a dog", "a dog", "a dog")
        assert encoders.loads == 3 and encoders.released == NAMES
        assert [part() for part in freed] == [None] * 3
    finally:
        gc.enable()


def test_an_encoder_that_is_called_beside_encode_prompt_stays(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    encoders = held(pipe, tmp_path)
    with encoders.working(), torch.no_grad():
        pipe.text_encoder_2(torch.zeros(1, 4, dtype=torch.int64))
    assert encoders.released == ["text_encoder", "text_encoder_3"]


def test_quantised_encoders_of_a_given_pipeline_stay(tmp_path, caplog):
    class Quantised(torch.nn.Parameter):
        pass

    pipe, _ = tiny_pipelines.build("sd15")
    part = pipe.text_encoder.get_input_embeddings()
    part.weight = Quantised(part.weight.data)
    assert not is_plain(pipe.text_encoder)
    encoders = held(pipe, tmp_path)
    with encoders.working():
        pass
    assert encoders.released == [] and "is quantised and stays in memory; give the model by" in caplog.text


def test_the_last_calls_are_remembered():
    calls = []

    def forward(ids, scale=1.0):
        calls.append(ids.tolist())
        return {"out": ids * scale}

    remembering = remember_calls(forward)
    first = remembering(torch.tensor([1.0]))
    first["out"].zero_()  # the caller may write into what it gets
    assert remembering(torch.tensor([1.0]))["out"].item() == 1.0 and len(calls) == 1
    assert remembering(torch.tensor([1.0]), scale=2.0)["out"].item() == 2.0 and len(calls) == 2
    for number in range(2, 20):
        remembering(torch.tensor([float(number)]))
        remembering(torch.tensor([1.0]))
    assert calls.count([1.0]) == 2 and len(calls) == 20
    remembering(torch.tensor([2.0]))
    assert calls.count([2.0]) == 2  # long ago


def test_models_are_told_apart(tmp_path, monkeypatch):
    one, same, other = (tiny_pipelines.build("sd3", seed)[0] for seed in (0, 0, 1))
    assert identify_pipeline(one) == identify_pipeline(same) != identify_pipeline(other)
    one.save_pretrained(tmp_path / "one")
    found = identify_source(tmp_path / "one")
    assert identify_source(tmp_path / "one") == found
    config = tmp_path / "one/tokenizer/tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    assert identify_source(tmp_path / "one") != found
    with monkeypatch.context() as context:
        context.setattr(text_encoders, "SMALL", 0)  # what is large is not read
        found = identify_source(tmp_path / "one")
        os.utime(config, ns=(1, 1))
        assert identify_source(tmp_path / "one") != found
    (tmp_path / "one/transformer/config.json").write_text("{}")  # none of the encoders' business
    assert identify_source("owner/name", revision="main") == "owner/name@main"  # not downloaded yet
    names = set()
    eight = {"quantization": {"text_encoder_3": "torchao"}}
    for settings in ({}, {"model_init_kwargs": {"torch_dtype": "bfloat16"}}, eight):
        args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True, **settings)
        names.add(identify_encoders(one, str(tmp_path / "one"), args))
    assert len(names) == 3 and all(name.startswith("StableDiffusion3Pipeline-") for name in names)
    assert [line.split()[0] for line in describe_versions()] == ["torch", "transformers", "diffusers"]


def test_stand_ins_are_made_without_reading_weights(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.save_pretrained(tmp_path / "one")
    for path in (tmp_path / "one").glob("text_encoder*/*.safetensors"):
        path.unlink()
    parts = make_stand_ins(tmp_path / "one", {"text_encoder_3": torch.float16, "default": torch.bfloat16})
    assert list(parts) == NAMES
    assert [part.dtype for part in parts.values()] == [torch.bfloat16, torch.bfloat16, torch.float16]
    loaded = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "one", **parts)
    assert isinstance(loaded.text_encoder, StandIn) and loaded.config["text_encoder_3"][1] == "T5EncoderModel"
