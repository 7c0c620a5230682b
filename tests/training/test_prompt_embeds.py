"""Prompts are encoded once, before a run; what is sampled and trained is the same, and no text encoder is needed."""

import json
from types import SimpleNamespace

import embedding_runs
import pytest
import ranks_server
import tiny_pipelines
import torch
from datasets import Dataset, Image
from embedding_runs import ALONE, counted
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_runs import (
    LORA,
    PROMPTS,
    SETTINGS,
    are_equal,
    brightness,
    difference,
    finished_run,
    latent_mean,
    logged,
    trained_weights,
    trainer_for,
)

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.call_form import learn_forms
from diffusion_grpo.data.inputs import PipelineInputs
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.policy.unguided import switch_guidance_off
from diffusion_grpo.training import prompt_embeds
from diffusion_grpo.training.lazy_modules import find_lazy_modules, is_lazy, list_text_encoders
from diffusion_grpo.training.prompt_embeds import PromptEmbeds, describe_text, find_distinct

# kinds of `encode_prompt`, all of which take nothing but texts; images beside the prompt do no harm
FAMILIES = ["sd3", "flux", "sdxl", "wan", "sana", "cascade_prior", "ltx2", "wan_image", "hunyuan_video", "qwen_image"]
FAMILIES += ["flux2", "z_image", "stable_audio", "glm_image", "flux_kontext"]
TEXTS = ["a cat", "a dog", "a much longer prompt that says more"]  # of two lengths
ENCODERS = ["text_encoder", "text_encoder_2", "text_encoder_3"]
ONE_UPDATE = {"max_steps": 1, "watch_rewards": None, "log_completions": False, "rewards": latent_mean}


def sample(policy, inputs, texts):
    """The latents after the first step of each text's sample, in the calls that a rollout makes."""
    rows, found = [{"prompt": text} for text in texts], {}
    if inputs.repeated:  # a picture for all samples, which not every pipeline takes in a list
        learn_forms(inputs, policy, rows[:1], None)
    for part in inputs.parts(rows):
        given = inputs([rows[index] for index in part])
        _, trajectory = rollout(
            policy, given, seeds=[0] * len(part), steps=[[0]] * len(part), num_inference_steps=4, is_complete=False
        )
        found |= dict(zip(part, trajectory.next_latents[:, 0], strict=True))
    return [found[index] for index in range(len(texts))]


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_are_the_same_and_encoders_leave(name, tmp_path):
    plain, inputs = embedding_runs.case(name, tmp_path)
    plainly = [sample(plain, inputs, [text])[0] for text in TEXTS]
    policy, inputs = embedding_runs.case(name, tmp_path)
    with counted(policy.pipe) as calls:
        embeds = embedding_runs.embeds(policy, inputs)
        embeds.prepare(ALONE, [Dataset.from_dict({"prompt": TEXTS[:2] * 2})], TEXTS[2:])
        ahead, encoded = len(calls), policy.prompts.encoded
        alone = [sample(policy, inputs, [text])[0] for text in TEXTS]
        together = sample(policy, inputs, [*TEXTS, TEXTS[0]])
        embeds.prepare(ALONE, [], TEXTS)
    assert all(map(torch.equal, alone, plainly))
    assert all(torch.allclose(*pair, atol=1e-3) for pair in zip(together, [*plainly, plainly[0]], strict=True))
    assert 0 < ahead == len(calls) and policy.prompts.encoded == 0 < encoded
    encoders = [getattr(policy.pipe, part) for part in list_text_encoders(policy.pipe.components)]
    assert all(is_lazy(part) and not part.is_loaded for part in encoders if part is not None)


def test_prompts_of_different_lengths_never_share_a_call(tmp_path):
    policy, inputs = embedding_runs.case("qwen_image", tmp_path)
    embedding_runs.embeds(policy, inputs).prepare(ALONE, [], TEXTS)
    rows = [{"prompt": text} for text in [*TEXTS, TEXTS[0]]]
    assert inputs.parts(rows) == [[0, 1, 3], [2]]
    assert embedding_runs.case("qwen_image", tmp_path)[1].parts(rows) == [[0, 1, 2, 3]]


def test_calls_without_guidance_are_encoded_too(tmp_path):
    """Losses on re-noised samples roll out with guidance and train without it."""
    policy, inputs = embedding_runs.case("sd3", tmp_path, loss_type="nft")
    with counted(policy.pipe) as calls:
        embedding_runs.embeds(policy, inputs).prepare(ALONE, [], TEXTS)
        ahead, arguments = len(calls), inputs([{"prompt": TEXTS[1]}])
        for given in (arguments, switch_guidance_off(policy.pipe, policy.networks, arguments)):
            policy.encode_prompts(given, 4)
    assert len(calls) == ahead > 0


def test_a_prompt_that_was_not_encoded_brings_the_encoders_back(tmp_path):
    plain, inputs = embedding_runs.case("flux", tmp_path)
    expected = sample(plain, inputs, ["another text"])
    policy, inputs = embedding_runs.case("flux", tmp_path)
    embeds = embedding_runs.embeds(policy, inputs)
    embeds.prepare(ALONE, [], TEXTS)
    assert torch.allclose(sample(policy, inputs, ["another text"])[0], expected[0], atol=1e-5)
    assert all(part.is_loaded for part in find_lazy_modules(policy.pipe).values())
    embeds.prepare(ALONE, [], ["a third one"])
    assert not any(part.is_loaded for part in find_lazy_modules(policy.pipe).values())


@pytest.mark.parametrize(
    ("name", "mode", "own"),
    [("sd3", "disk", {"offload_frozen": "cpu"}), ("wan", "memory", {})],
)
def test_a_run_trains_the_same_weights(name, mode, own, tmp_path):
    folder = {"prompt_embeds_dir": str(tmp_path / "embeds")} if mode == "disk" else {}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "validation_prompts": ["a lamp"], "validation_steps": 1}
    settings = ONE_UPDATE | evaluated
    plain = finished_run(tmp_path / "plain", name, **settings)
    pipe, _ = tiny_pipelines.build(name)
    with counted(pipe) as calls:
        kept = trainer_for(tmp_path / "kept", name, cache_prompt_embeds=mode, **folder, **own, **settings)
        ahead = len(calls)
        kept.train()
    assert 0 < ahead == len(calls)
    assert are_equal(trained_weights(plain), trained_weights(kept))
    assert logged(plain, "eval_reward") == logged(kept, "eval_reward") and logged(kept, "ratio/max_error") == [0.0]
    plainly, kept_files = (sorted((tmp_path / run / "validation").rglob("0000.*")) for run in ("plain", "kept"))
    assert plainly
    assert [file.read_bytes() for file in plainly] == [file.read_bytes() for file in kept_files]


def test_a_pipeline_is_trained_twice_and_stays_usable(tmp_path):
    pipe, inputs = tiny_pipelines.build("sd3")
    call = inputs | {"prompt": "a cat", "num_inference_steps": 2, "output_type": "pt"}
    sample = lambda: pipe(**call, generator=torch.Generator().manual_seed(0)).images  # noqa: E731
    before, settings, trained = sample(), ONE_UPDATE | {"cache_prompt_embeds": "disk"}, []
    settings["prompt_embeds_dir"] = str(tmp_path / "embeds")
    for run in ("first", "second"):
        trainer = finished_run(tmp_path / run, model=pipe, **settings)
        trained.append(trained_weights(trainer))
        assert [part.is_loaded for part in find_lazy_modules(pipe).values()] == [False] * 3
        assert (trainer.policy.prompts.encoded == 0) == (run == "second")
        pipe.unload_lora_weights()
    # weights that were moved lie elsewhere in memory, and MKL's sums may depend on their alignment
    assert difference(*trained) <= 1e-6
    pipe.to(torch.bfloat16)
    assert sample().dtype == torch.bfloat16
    assert torch.allclose(pipe.to(torch.float32) and sample(), before, atol=0.05)


def train_by_name(folder, source, lora=True, **settings):
    """A trainer of a model named by its folder, after one update."""
    trainer = DiffusionGRPOTrainer(
        model=str(source),
        reward_funcs=latent_mean,
        args=DiffusionGRPOConfig(
            str(folder),
            **{**SETTINGS, "max_steps": 1, "watch_rewards": None, "height": 16, "width": 16, **settings},
            pipeline_kwargs={"max_sequence_length": 8},
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=LoraConfig(**LORA) if lora else None,
    )
    trainer.train()
    return trainer


def test_a_later_run_does_not_even_load_the_encoders(tmp_path, monkeypatch):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.save_pretrained(tmp_path / "model")
    plain = trained_weights(train_by_name(tmp_path / "plain", tmp_path / "model"))
    settings = {"cache_prompt_embeds": "disk", "prompt_embeds_dir": str(tmp_path / "embeds")}
    loads, load = [], prompt_embeds.load_encoder
    monkeypatch.setattr(prompt_embeds, "load_encoder", lambda *args: loads.append(args[-1]) or load(*args))
    for run in ("first", "second"):
        with counted(pipe) as calls:
            trainer = train_by_name(tmp_path / run, tmp_path / "model", **settings)
        assert bool(calls) == (run == "first") and sorted(loads) == ENCODERS
        assert [part.is_loaded for part in find_lazy_modules(trainer.pipe).values()] == [False] * 3
        assert are_equal(trained_weights(trainer), plain)
    # a user may call the pipeline at any time
    image = trainer.pipe("a new prompt", num_inference_steps=2, height=16, width=16, max_sequence_length=8).images[0]
    assert image.size == (16, 16) and len(loads) == 6


def test_encoders_that_are_given_as_objects_are_told_apart_and_leave(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.save_pretrained(tmp_path / "model")
    settings = {"cache_prompt_embeds": "disk", "prompt_embeds_dir": str(tmp_path / "embeds")}
    found = []
    for seed in (1, 2):
        encoder = tiny_pipelines.build("sd3", seed)[0].text_encoder
        own = {"model_init_kwargs": {"text_encoder": encoder}}
        with counted(pipe) as calls:
            trainer = train_by_name(tmp_path / str(seed), tmp_path / "model", **settings, **own)
        assert calls and not trainer.pipe.text_encoder.is_loaded
        found.append(trained_weights(trainer))
    assert not are_equal(found[0], found[1])
    folders = [path for path in (tmp_path / "embeds").iterdir() if path.name.startswith("StableDiffusion3Pipeline-")]
    assert len(folders) == 2


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def test_a_run_encodes_while_its_quantised_network_waits(tmp_path, monkeypatch):
    pipe, _ = tiny_pipelines.build("sd3")
    network, events, place = pipe.transformer, [], [torch.device("cuda:0")]
    config = SimpleNamespace(**BNB)
    network.hf_quantizer = SimpleNamespace(quantization_config=config, is_trainable=True)
    monkeypatch.setattr(type(network), "device", property(lambda _: place[0]))

    def to(device, *_):
        place[0] = torch.device(device)
        events.append(str(device))
        return network

    def encode(self, *args):
        events.append("encode")
        real(self, *args)

    real = PromptEmbeds.encode
    monkeypatch.setattr(network, "to", to, raising=False)
    monkeypatch.setattr(PromptEmbeds, "encode", encode)
    trainer_for(tmp_path, model=pipe, cache_prompt_embeds="memory", **ONE_UPDATE)
    assert events[:3] == ["cpu", "encode", "cpu"]  # the last is this run's device


def test_a_whole_pipeline_is_saved_with_its_encoders(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.save_pretrained(tmp_path / "model")
    trainer = train_by_name(tmp_path / "run", tmp_path / "model", lora=False, cache_prompt_embeds="memory")
    trainer.save_model()
    for part in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        assert are_equal(*(load_file(tmp_path / place / part / "model.safetensors") for place in ("run", "model")))
    assert json.loads((tmp_path / "run/model_index.json").read_text())["text_encoder"][1].startswith("CLIP")


def test_a_resumed_run_is_the_unbroken_one(tmp_path):
    settings = {"cache_prompt_embeds": "memory", "rewards": latent_mean, "watch_rewards": None}
    settings |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    whole = finished_run(tmp_path / "whole", **settings)
    trainer_for(tmp_path / "broken", **settings | {"max_steps": 1}).train()
    resumed = finished_run(tmp_path / "broken", **settings, resume_from_checkpoint="True")
    assert are_equal(trained_weights(whole), trained_weights(resumed))


def test_each_of_two_processes_encodes_its_share(tmp_path):
    settings = {"cache_prompt_embeds": "disk", "max_steps": 1, "per_device_train_batch_size": 2, "num_generations": 4}
    settings |= {"gradient_accumulation_steps": 4}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        ranks_server.succeed(folder / "processes", processes, embedding_runs.run, folder, dict(settings))
    assert difference(*(load_file(tmp_path / run / "weights.safetensors") for run in "12")) < 1e-6
    reports = [
        json.loads((tmp_path / run).read_text()) for run in ("2/result-0.json", "2/result-1.json", "1/result-0.json")
    ]
    assert [report["during"] for report in reports] == [0, 0, 0]
    first, second, alone = ({*map(tuple, report["calls"])} for report in reports)
    assert first | second == alone
    negative = first & second  # which is encoded beside the prompt, by each of the encoders
    assert len(negative) == 3 < min(len(first), len(second))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("start", "OSError: cannot read the tokenizer"),
        pytest.param("exchange", "OSError: no space left on device", marks=pytest.mark.distributed),
        pytest.param("evaluation", "OSError: cannot read the tokenizer", marks=pytest.mark.distributed),
    ],
)
def test_an_error_of_one_process_is_told_to_the_other(where, words, tmp_path):
    settings = {"per_device_train_batch_size": 2, "num_generations": 4, "gradient_accumulation_steps": 4}
    ended = ranks_server.run(tmp_path, 2, embedding_runs.fail, tmp_path / "run", settings, where)
    assert ended.codes == [1, 1]
    assert f"Process 1 of 2 failed with {words}" in ended.logs[0] and words in ended.logs[1]
    assert "which encodes prompts" in ended.logs[1] or where == "exchange"


def test_what_cannot_be_encoded_ahead_is_refused(tmp_path):
    settings = {"cache_prompt_embeds": "memory", "rewards": brightness}
    with pytest.raises(UnsupportedPipeline, match="encode_prompt of QwenImageEditPipeline takes 'image' in addition"):
        trainer_for(tmp_path / "a", "qwen_image_edit", **settings)
    with pytest.raises(UnsupportedPipeline, match="GlmImagePipeline has no frozen text encoder"):
        trainer_for(tmp_path / "c", "glm_image", lora=False, train_component="vision_language_encoder", **settings)


def test_a_pipeline_that_encodes_nothing_before_its_network_is_refused(tmp_path, monkeypatch):
    policy, inputs = embedding_runs.case("sd3", tmp_path)
    monkeypatch.setattr(policy, "encode_prompts", lambda *args: [])  # calls that were made
    with pytest.raises(UnsupportedPipeline, match="cache_prompt_embeds"):
        embedding_runs.embeds(policy, inputs).prepare(ALONE, [], TEXTS)


def inputs_of(name, tmp_path):
    return PipelineInputs(tiny_pipelines.build(name)[0], DiffusionGRPOConfig(str(tmp_path), **SETTINGS))


def test_equal_rows_are_found_once(tmp_path):
    inputs = inputs_of("sd3", tmp_path)
    columns = {"prompt": ["a", "b", "a", "a"], "height": [16, 16, 16, 32], "mood": ["x", "y", "z", "x"]}
    dataset = Dataset.from_dict(columns)
    assert list(find_distinct(dataset, inputs).values()) == [0, 1, 3]
    assert list(find_distinct(dataset.with_format("torch"), inputs).values()) == [0, 1, 3]
    assert describe_text(dataset[3], inputs.accepted) == (("prompt", "a"), ("height", 32))


def test_a_transform_decides_what_is_equal(tmp_path):
    dataset = Dataset.from_dict({"prompt": ["a", "A", "a"], "height": [16, 32, 64]})

    def transform(rows):
        negative = ["grey" if height == 16 else "blurred" for height in rows["height"]]
        return {"prompt": [prompt.lower() for prompt in rows["prompt"]], "negative_prompt": negative}

    dataset.set_transform(transform)
    found = find_distinct(dataset, inputs_of("sd3", tmp_path))
    assert found == {(("prompt", "a"), ("negative_prompt", text)): row for row, text in enumerate(("grey", "blurred"))}


def test_files_count_by_whether_they_are_there(tmp_path):
    path = str(tmp_path / "a.png")
    tiny_pipelines.conditioned.draw_images()[0].save(path)
    inputs = inputs_of("flux_kontext", tmp_path)
    dataset = Dataset.from_dict({"prompt": ["a", "a", "a"], "image": [path, None, path]})
    for given in (dataset, dataset.cast_column("image", Image())):
        assert list(find_distinct(given, inputs).values()) == [0, 1]
