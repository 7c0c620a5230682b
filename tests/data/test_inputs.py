"""Which samples share a pipeline call: found out by asking the pipeline, and by shape."""

import functools
import inspect
import types

import numpy as np
import pytest
import tiny_pipelines
import torch
from datasets import Dataset, Video
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    LTXPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionImg2ImgPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVideoToVideoPipeline,
)
from peft import LoraConfig
from PIL import Image
from tiny_runs import LORA, SETTINGS, assert_resumes, brightness, joined_trajectory, logged, trainer_for

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data import call_form
from diffusion_grpo.data.call_form import learn_forms
from diffusion_grpo.data.columns import RowError
from diffusion_grpo.data.inputs import Form, PipelineInputs, build_arguments, group_by_shape, prepare_inputs
from diffusion_grpo.media.serialize import pack_values
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy
from diffusion_grpo.rewards import load_rewards

KONTEXT = inspect.unwrap(FluxKontextPipeline.__call__)
FIXED = {"max_area": 256, "_auto_resize": False}
NOT_CALLED = {"draws_tokens": False, "loop_length": None, "component": (), "experts": (), "frozen_experts": []}
UNUSED = types.SimpleNamespace(draws_globally=False, **NOT_CALLED)  # a policy


def make_image(seed=0, size=(16, 16), mode="RGB"):
    numbers = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(numbers).convert(mode)


class Blend(FluxKontextPipeline):
    """Reads a list of images as several of one sample."""

    def __call__(self, prompt, image, guidance_scale=3.5, num_inference_steps=28, generator=None, output_type="pil"):
        own = dict(num_inference_steps=num_inference_steps, guidance_scale=guidance_scale, generator=generator)
        return KONTEXT(self, prompt=prompt, image=self.read(image), output_type=output_type, **FIXED, **own)

    def read(self, image):
        if not isinstance(image, list):
            return image
        mean = np.mean([np.asarray(one, dtype=float) for one in image], axis=0)
        return Image.fromarray(mean.astype(np.uint8))


class Embedded(Blend):
    """Cannot be called without a prompt, which may be None."""

    def __call__(self, prompt, image, prompt_embeds=None):
        raise NotImplementedError


class FirstOnly(Blend):
    """Reads a list of images by its first alone."""

    def read(self, image):
        return image[0] if isinstance(image, list) else image


class Listed(Blend):
    """Takes one sample at a time, and its image in a list only."""

    def read(self, image):
        if not isinstance(image, list) or len(image) > 1:
            raise TypeError(f"one image in a list, not {type(image).__name__}")
        return image


def settings(folder, **changes):
    return DiffusionGRPOConfig(str(folder), **{**SETTINGS, **changes})


def kontext(cls=FluxKontextPipeline):
    pipe, inputs = tiny_pipelines.build("flux_kontext")
    pipe.__class__ = cls
    fixed = {"guidance_scale": inputs["guidance_scale"]} if "guidance_scale" in inputs else {}
    return pipe, fixed | (FIXED if cls is FluxKontextPipeline else {})


def learned(cls, folder, row=None, **changes):
    pipe, fixed = kontext(cls)
    pipe.vae.decode = None  # a few steps say enough: nothing is decoded
    inputs = PipelineInputs(pipe, settings(folder, pipeline_kwargs=fixed, **changes))
    row = row or {"prompt": "a red cat", "image": make_image(), "color": "red"}
    learn_forms(inputs, DenoisingPolicy(pipe), [row, dict(row)], noise_level=0.7)
    return inputs, row


@pytest.mark.parametrize(
    ("cls", "form"),
    [
        (FluxKontextPipeline, Form("batched")),
        (Blend, Form("single", "in a batch, 'image' of one sample changes other samples")),
        (FirstOnly, Form("single", "in a batch, 'image' of the last sample is not used")),
        (Listed, Form("listed", "one image in a list, not list")),
    ],
)
def test_the_pipeline_is_asked_once(tmp_path, caplog, cls, form):
    inputs, row = learned(cls, tmp_path, num_inference_steps=2)  # of which the last has no noise
    learn_forms(inputs, UNUSED, [row], noise_level=0.7)  # known: the pipeline is not called again
    assert inputs.forms == {frozenset({"prompt", "image"}): form}
    warned = [record.message for record in caplog.records if record.name == "diffusion_grpo.data.call_form"]
    assert len(warned) == (form.reason is not None) and all(cls.__name__ in x and form.reason in x for x in warned)
    rows = [row, row | {"image": make_image(1)}]
    assert inputs.parts(rows) == ([[0, 1]] if form.name == "batched" else [[0], [1]])
    expected = row["image"] if form.name == "single" else [row["image"]]
    assert inputs([row])["image"] == expected and inputs([row])["prompt"] in ("a red cat", ["a red cat"])


@pytest.mark.parametrize("cls", [FluxKontextPipeline, Blend])
def test_a_picture_for_all_prompts_is_given_as_a_column_would_be(tmp_path, cls):
    pipe, fixed = kontext(cls)
    pipe.vae.decode = None
    picture = make_image()
    inputs = PipelineInputs(pipe, settings(tmp_path, pipeline_kwargs=fixed | {"image": picture}))
    rows = [{"prompt": "a red cat"}, {"prompt": "a dog", "image": make_image(1)}]
    learn_forms(inputs, DenoisingPolicy(pipe), rows[:1], noise_level=0.7)
    if cls is Blend:  # takes a list of pictures for one sample
        assert inputs(rows[:1])["image"] is picture and inputs.parts([rows[0]] * 2) == [[0], [1]]
    else:
        assert inputs(rows)["image"] == [picture, rows[1]["image"]]


@pytest.mark.parametrize("other", [{"per_device_eval_batch_size": 4}, {"rollout_batch_size": 1}], ids=str)
def test_calls_that_are_larger_than_those_of_a_rollout_count(tmp_path, other):
    sizes = {"per_device_train_batch_size": 4 if "rollout_batch_size" in other else 1, "num_generations": 4}
    inputs, row = learned(Blend, tmp_path, **sizes, **other, gradient_accumulation_steps=4)
    assert [form.name for form in inputs.forms.values()] == ["single"]


@pytest.mark.parametrize(
    ("pipeline", "given", "expected"),
    [
        (WanPipeline, {}, 16.0),
        (WanPipeline, {"fps": 8.0}, 8.0),
        (LTXPipeline, {}, 25.0),
        (LTXPipeline, {"pipeline_kwargs": {"frame_rate": 12}}, 12.0),
        (LTXPipeline, {"pipeline_kwargs": {"frame_rate": 12}, "fps": 12.0}, 12.0),
        (LTXPipeline, {"fps": 16.0}, None),  # not that of the pipeline
    ],
)
def test_videos_have_the_rate_at_which_the_pipeline_makes_them(tmp_path, pipeline, given, expected):
    if expected is not None:
        assert PipelineInputs(pipeline, settings(tmp_path, **given)).fps == expected
        return
    with pytest.raises(ValueError, match="fps=16, but .* frame_rate=25"):
        PipelineInputs(pipeline, settings(tmp_path, **given))


def test_a_rate_of_its_own_for_each_row_is_refused(tmp_path):
    data = Dataset.from_dict({"prompt": ["a"], "frame_rate": [12]})
    with pytest.raises(ValueError, match="train_dataset, column 'frame_rate'"):
        prepare_inputs(LTXPipeline, settings(tmp_path), [("train_dataset", data)], [])
    shown = data.with_transform(lambda rows: {"prompt": rows["prompt"]})  # whose rows have no such column
    prepare_inputs(LTXPipeline, settings(tmp_path), [("train_dataset", shown)], [])


def test_what_a_pipeline_cannot_be_called_without_is_asked_for(tmp_path):
    data = Dataset.from_dict({"prompt": ["a"], "imgae": ["x.png"]})
    with pytest.raises(ValueError, match="train_dataset has no column 'image'.*prompt, imgae"):
        prepare_inputs(WanImageToVideoPipeline, settings(tmp_path), [("train_dataset", data)], [])
    shown = data.with_transform(lambda rows: {"prompt": rows["prompt"], "image": [make_image()] * len(rows["prompt"])})
    prepare_inputs(WanImageToVideoPipeline, settings(tmp_path), [("train_dataset", shown)], [])
    args = settings(tmp_path, validation_prompts=["a fox"])
    with pytest.raises(ValueError, match="validation_prompts .* 'image'"):
        prepare_inputs(WanImageToVideoPipeline, args, [], [])
    embedded = Dataset.from_dict({"prompt_embeds": [[[0.0]]], "image": [make_image()]})
    prepare_inputs(Embedded, settings(tmp_path), [("train_dataset", embedded)], [])


def test_paths_of_images_that_nothing_takes_are_warned_of(tmp_path, caplog):
    data = Dataset.from_dict({"prompt": ["a"], "image": ["x.png"], "place": ["Rome"], "images": [make_image()]})
    rewards = load_rewards([brightness, {"ssim": {"target_column": "image"}}])
    prepare_inputs(WanPipeline, settings(tmp_path), [("train_dataset", data)], [])
    prepare_inputs(WanPipeline, settings(tmp_path), [("eval_dataset", data)], rewards)
    first, second = caplog.messages  # a reward gets the samples as `images`, not the column of that name
    assert first.startswith("train_dataset: WanPipeline does not take image, images, and no reward names it")
    assert second.startswith("eval_dataset: WanPipeline does not take images, and no reward names it")


@pytest.mark.parametrize(
    ("name", "asks"), [("num_inference_steps", True), ("num_images_per_prompt", True), ("latents", False)]
)
def test_columns_that_the_pipeline_never_gets_are_named_unless_a_reward_reads_them(tmp_path, caplog, name, asks):
    def by_steps(images, num_inference_steps, num_images_per_prompt=1, latents=None):
        """Has parameters named like the pipeline's; `latents` are those of the samples."""

    row = {"prompt": "a", name: 4}
    for rewards, is_named in ((load_rewards(by_steps), not asks), ([], True)):
        data = [("train_dataset", Dataset.from_list([row]))]
        inputs = prepare_inputs(StableDiffusion3Pipeline, settings(tmp_path), data, rewards)
        assert (name in caplog.text) is is_named and name not in inputs([row])


@pytest.mark.parametrize(
    ("name", "value"),
    [("latents", 1), ("num_images_per_prompt", 2), ("negative_prompt", ["a", "b"]), ("sharpness", 1)],
)
def test_arguments_that_are_not_the_users_are_refused(tmp_path, name, value):
    inputs = PipelineInputs(StableDiffusion3Pipeline, settings(tmp_path))
    inputs.check_arguments({"negative_prompt": "blurry", "skip_guidance_layers": [7, 8]})
    with pytest.raises(ValueError, match=f"^eval_pipeline_kwargs: .*{name}"):
        inputs.check_arguments({"negative_prompt_2": "blurry", name: value}, "eval_pipeline_kwargs")
    with pytest.raises(ValueError, match=f"^pipeline_kwargs: .*{name}"):
        PipelineInputs(inputs.pipeline, settings(tmp_path, pipeline_kwargs={name: value}))


def learn_half_a_loop(folder, window, row=None):
    """Ask an image-to-image pipeline that takes five of ten steps, of which the first four may be trained."""
    pipe, given = tiny_pipelines.build("sd3_img2img")
    fixed = {k: v for k, v in given.items() if k not in ("prompt", "image")} | {"strength": 0.5}
    args = settings(folder, pipeline_kwargs=fixed, num_inference_steps=10, **window)
    given = {"prompt": "a red cat", "image": make_image()} | (row or {})
    inputs = PipelineInputs(pipe, args)
    learn_forms(inputs, DenoisingPolicy(pipe), [given], noise_level=0.7)
    return inputs


def test_a_window_beyond_the_steps_of_the_pipeline_is_refused_at_once(tmp_path):
    with pytest.raises(UnsupportedPipeline, match="takes 5 of 10 steps.*trained_steps"):
        learn_half_a_loop(tmp_path, {})
    assert learn_half_a_loop(tmp_path, {"trained_steps": [0, 4]}).forms
    assert learn_half_a_loop(tmp_path, {}, {"strength": 0.5}).forms  # another row may take more steps


class Moody(FirstOnly):
    """Ignores all images of a list but the first, and cannot read dark ones."""

    def read(self, image):
        if not isinstance(image, list) and np.asarray(image).mean() < 100:
            raise OSError("this image is too dark to read")
        return super().read(image)


@pytest.mark.parametrize(("shade", "form"), [(200, "single"), (50, "listed")])
def test_an_image_that_cannot_be_read_is_no_reason_to_ignore_it(tmp_path, shade, form):
    """A batch reads the first image alone; another one is too dark, or is when it is turned around."""
    inputs, _ = learned(Moody, tmp_path, {"prompt": "a red cat", "image": Image.new("RGB", (16, 16), (shade,) * 3)})
    assert [each.name for each in inputs.forms.values()] == [form]


def test_a_row_that_the_pipeline_refuses_is_named(tmp_path):
    class Fussy(Blend):
        def read(self, image):
            raise OSError("no image is good enough")

    with pytest.raises(RowError, match="'a red cat'.*: OSError: no image is good") as failure:
        learned(Fussy, tmp_path)
    assert isinstance(failure.value.__cause__, OSError)


def test_rows_are_grouped_by_what_one_call_must_share():
    accepted = {"prompt", "image", "height", "video", "boxes", "sound", "negative_prompt"}
    base = {"prompt": "a", "image": make_image(), "height": 16, "video": [make_image()] * 2, "boxes": [0.1, 0.2]}
    base |= {"sound": torch.zeros(1, 4), "negative_prompt": None, "color": "red"}
    changes = [
        {},
        {"prompt": "longer", "image": make_image(1), "boxes": [0.3, 0.4], "color": "blue"},  # shares the first's call
        {"height": 32},
        {"image": make_image(0, (32, 16))},
        {"image": make_image(0, mode="L")},
        {"video": [make_image()] * 3},
        {"sound": torch.zeros(1, 8)},
        {"negative_prompt": "x"},
        {"height": 32, "prompt": "b"},
    ]
    groups = group_by_shape([base | change for change in changes], accepted)
    assert groups == [[0, 1], [2, 8], [3], [4], [5], [6], [7]]


def test_another_number_of_samples_is_refused():
    inputs = PipelineInputs(Blend, DiffusionGRPOConfig("runs", use_cpu=True))
    inputs.check_samples([1, 2], 2, {})
    with pytest.raises(UnsupportedPipeline, match="Blend returned 1 samples where 2 were asked for"):
        inputs.check_samples([1], 2, {})


def test_samples_of_another_size_than_was_asked_for_are_told_once(caplog):
    def told(pipeline, samples, row=None, overrides=None, **settings):
        caplog.clear()
        inputs = PipelineInputs(pipeline, DiffusionGRPOConfig("runs", use_cpu=True, **settings))
        for _ in range(2):
            inputs.check_samples(samples, 1, inputs([{"prompt": "a"} | (row or {})], **overrides or {}))
        return [record.getMessage() for record in caplog.records]

    image, size = make_image(0, (32, 16)), {"height": 16, "width": 32}
    assert told(FluxKontextPipeline, [image], **size) == told(FluxKontextPipeline, [image]) == []
    assert told(FluxKontextPipeline, [torch.zeros(4, 2, 2)], **size) == []  # latents
    (message,) = told(FluxKontextPipeline, [image], height=16, width=64)
    assert "although width=64 was asked for" in message and "max_area" in message
    assert told(WanPipeline, [[image] * 5], **size, num_frames=5) == []
    (message,) = told(WanPipeline, [[image] * 5], **size, num_frames=6)
    assert "num_frames=5, although num_frames=6 was asked for" in message and "max_area" not in message
    assert told(WanPipeline, [[image] * 5], {"num_frames": 9}, **size, num_frames=5)[0].endswith("=9 was asked for.")
    assert told(WanPipeline, [[image] * 9], overrides={"num_frames": 9}, **size, num_frames=5) == []  # an evaluation's
    assert told(StableDiffusionImg2ImgPipeline, [image], {"height": 480, "width": 640}) == []  # columns about the file


def test_classes_are_given_sample_by_sample(tmp_path):
    """Those of different prompts share a call, and each sample is of its own class."""
    pipe, inputs = tiny_pipelines.build("dit")
    rows = {"prompt": ["a cat", "a dog", "a tree", "the sea"], "class_labels": [3, 7, 1, 5]}
    own = {"num_generations": 2, "guidance_scale": inputs["guidance_scale"], "samples_per_latent": 1}
    trainer = trainer_of(tmp_path, pipe, {}, rows, **own, max_steps=1)
    seen = []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["class_labels"].tolist()), with_kwargs=True
    )
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0]
    assert all(len(labels) == 8 and labels[4:] == [1000] * 4 for labels in seen)
    assert {label for labels in seen for label in labels[:4]} == {3, 7, 1, 5}


def trainer_of(folder, pipe, fixed, rows, rewards=brightness, **changes):
    args = settings(folder, pipeline_kwargs=fixed, **changes)
    data = Dataset.from_dict(rows)
    return DiffusionGRPOTrainer(pipe, rewards, args, train_dataset=data, peft_config=LoraConfig(**LORA))


def edits(sizes):
    images = [make_image(seed, size) for seed, size in enumerate(sizes)]
    return {"prompt": ["a red cat", "a blue dog", "a tree", "the sea"][: len(sizes)], "image": images}


def test_one_by_one_is_what_batches_of_one_do(tmp_path):
    """Rollout and update pass the samples of a micro-batch one after the other, and the loss stays the same."""
    runs = []
    for folder, size in (("four", 4), ("one", 1)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "max_steps": 1}
        runs.append(trainer_of(tmp_path / folder, *kontext(Blend), edits([(16, 16)] * 4), seed=3, **changes))
        runs[-1].train()
    four, one = runs
    assert torch.equal(*(joined_trajectory(trainer).next_latents for trainer in (four, one)))
    assert logged(four, "ratio/max_error") == logged(one, "ratio/max_error") == [0.0]
    assert logged(four, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-5)


def test_a_run_of_single_samples_is_resumed_within_a_rollout(tmp_path):
    """The pipeline is asked again: taken as one that batches, it would blend the images of a micro-batch."""
    own = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
    own |= {"num_generations": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    assert_resumes(lambda folder: trainer_of(folder, *kontext(Blend), edits([(16, 16)] * 2), **own), tmp_path, 1)


def test_a_rollout_is_cut_into_calls_as_its_updates_are(tmp_path):
    inputs, row = learned(FluxKontextPipeline, tmp_path, per_device_train_batch_size=2)
    rows = [row | {"image": make_image(0, (16 * (place % count + 1), 16))} for count in (2, 1) for place in range(2)]
    assert inputs.calls(rows, 2) == [[0], [1], [2, 3]]


def test_processes_that_pass_the_network_together_ask_about_the_same_rows(tmp_path, monkeypatch):
    """This one has no negative prompt, the other one no plain row: both ask about both, each by one row."""
    own, others = {"prompt": "a cat", "color": "red"}, {"prompt": "a dog", "negative_prompt": "grey"}
    given = PipelineInputs(StableDiffusion3Pipeline, settings(tmp_path))
    monkeypatch.setattr(call_form, "gather_json", lambda _, asked: [asked, [["negative_prompt", "prompt"]]])
    sent = {0: None, 1: pack_values([others])}
    monkeypatch.setattr(call_form, "broadcast_bytes", lambda _, mine, process: mine if process == 0 else sent[process])
    asked = []
    monkeypatch.setattr(call_form, "find_form", lambda policy, row, *rest, **more: asked.append(row) or Form("listed"))
    learn_forms(given, UNUSED, [own, dict(own)], noise_level=0.7, accelerator=types.SimpleNamespace(process_index=0))
    assert asked == [{"prompt": "a cat"}, others]
    assert given.parts([others, others]) == [[0], [1]]


@pytest.mark.parametrize("draws", [False, True])
def test_only_what_the_trial_calls_draw_counts(draws, tmp_path, monkeypatch):
    """A reward or a decoder may have drawn from the global generator before."""
    policy = types.SimpleNamespace(draws_globally=True, **NOT_CALLED)

    def find_form(policy, *rest, **more):
        policy.draws_globally |= draws
        return Form("batched")

    monkeypatch.setattr(call_form, "find_form", find_form)
    inputs = PipelineInputs(StableDiffusion3Pipeline, settings(tmp_path))
    learn_forms(inputs, policy, [{"prompt": "a cat"}], noise_level=0.7)
    assert inputs.draws_globally == draws and policy.draws_globally


def mixed(folder, **changes):
    """Two prompts of each of two sizes: the samples of most micro-batches are of both."""
    pipe, inputs = tiny_pipelines.build("sd3")
    fixed = {k: v for k, v in inputs.items() if not isinstance(v, list) and k not in ("height", "width")}
    rows = {"prompt": ["a red cat", "a blue dog", "a tree", "the sea"], "height": [16, 32, 16, 32], "width": [16] * 4}
    own = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "seed": 1}
    return trainer_of(folder, pipe, fixed, rows, **{**own, **changes})


def test_every_sample_weighs_the_same_however_shapes_part_them(tmp_path):
    def size_seen(images, height, **columns):
        assert [image.height for image in images] == height
        return brightness(images)

    runs = []
    for folder, size in (("together", 8), ("alone", 1)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 1}
        runs.append(mixed(tmp_path / folder, rewards=size_seen, **changes))
        runs[-1].train()
    together, alone = runs
    assert len({tuple(sample.latents.shape) for sample in together.loader.buffer.samples}) == 2
    assert logged(together, "ratio/max_error") == logged(alone, "ratio/max_error") == [0.0]
    assert logged(together, "grad_norm") == pytest.approx(logged(alone, "grad_norm"), rel=1e-4)


def test_a_resumed_run_of_mixed_sizes_equals_an_unbroken_one(tmp_path):
    own = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    _, again = assert_resumes(lambda folder: mixed(folder, **own), tmp_path, 1)  # within a rollout
    assert again.state.global_step == 5


def test_images_of_different_sizes_and_rows_without_one_are_edited_and_reach_the_rewards(tmp_path):
    taken, given = [], []
    pipe, fixed = kontext()
    encode = pipe.prepare_latents

    def prepare(image, *args, **kwargs):
        taken.append(image is not None and tuple(image.shape[-2:]))
        return encode(image, *args, **kwargs)

    pipe.prepare_latents = prepare

    def likeness(images, image, **columns):
        given.extend(one and one.size for one in image)
        return brightness(images)

    own = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "seed": 1}
    rows = edits([(16, 16), (32, 16), (16, 16), (32, 16)])
    rows["image"][3] = None
    trainer = trainer_of(tmp_path, pipe, fixed, rows, rewards=likeness, max_steps=2, **own)
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]
    assert set(taken) == {(16, 16), (16, 32), False}
    assert {size: given.count(size) for size in given} == {(16, 16): 4, (32, 16): 2, None: 2}


def test_a_missing_file_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    kontext()[0].save_pretrained(tmp_path / "pipe")
    monkeypatch.setattr(FluxKontextPipeline, "from_pretrained", None)
    rows = {"prompt": ["a", "b"], "image": [str(tmp_path / "gone.png")] * 2}
    with pytest.raises(ValueError, match="train_dataset, row 0 .*column 'image': there is no file .*gone.png"):
        trainer_of(tmp_path / "out", str(tmp_path / "pipe"), None, rows)
    with pytest.raises(ValueError, match="FluxKontextPipeline does not take num_frames"):
        trainer_of(tmp_path / "out", str(tmp_path / "pipe"), None, edits([(16, 16)] * 2), num_frames=3)


@pytest.mark.parametrize(
    "settings", [{"advantage_estimator": "gae"}, {"kl_reward": 0.1, "loss_type": "grpo"}], ids=str
)
def test_sizes_mix_with_a_value_model_and_with_kl_in_the_reward(tmp_path, settings):
    trainer = mixed(tmp_path, **settings)
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0] * 2 and all(np.isfinite(logged(trainer, "loss")))


@pytest.mark.parametrize(("sigmas", "levels"), [([1.0, 0.8, 0.3], (1.0, 0.8, 0.3)), ("even", (1.0, 2 / 3, 1 / 3))])
def test_sigmas_space_the_steps_of_training_and_not_of_evaluation(tmp_path, monkeypatch, sigmas, levels):
    real, found = FlowMatchEulerDiscreteScheduler.set_timesteps, []

    @functools.wraps(real)
    def noting(scheduler, *args, **kwargs):
        real(scheduler, *args, **kwargs)
        found.append(scheduler.sigmas.tolist())

    monkeypatch.setattr(FlowMatchEulerDiscreteScheduler, "set_timesteps", noting)
    steps = {"num_inference_steps": 3, "sigmas": sigmas, "eval_num_inference_steps": 4}
    trainer = trainer_for(tmp_path, max_steps=1, **steps)  # SD3 with a shift of 3
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0]
    shifted = [3 * sigma / (1 + 2 * sigma) for sigma in levels]
    assert found and all(each == pytest.approx([*shifted, 0.0], abs=1e-6) for each in found)

    found.clear()
    trainer.evaluate()
    own = FlowMatchEulerDiscreteScheduler(shift=3.0)
    real(own, 4)
    assert found[-1] == own.sigmas.tolist()


def test_pipelines_that_space_their_steps_take_sigmas_in_their_place(tmp_path):
    settings = {"name": "flux", "num_inference_steps": 3, "eval_num_inference_steps": 3, "max_steps": 1, "seed": 1}
    plain, spaced = (
        trainer_for(tmp_path / str(number), **settings, **given)
        for number, given in enumerate(({}, {"sigmas": [1.0, 0.9, 0.2]}))
    )
    for trainer in (plain, spaced):
        trainer.train()
        assert logged(trainer, "ratio/max_error") == [0.0]
    before, after = (joined_trajectory(trainer) for trainer in (plain, spaced))
    assert torch.equal(before.latents[:, 0], after.latents[:, 0])  # pure noise
    assert not torch.equal(before.next_latents[:, 0], after.next_latents[:, 0])


def test_a_pipeline_that_takes_no_sigmas_is_refused(tmp_path):
    steps = {"num_inference_steps": 3, "eval_num_inference_steps": 3, "sigmas": [1.0, 0.6, 0.3]}
    with pytest.raises(ValueError, match="^sigmas: WanPipeline"):
        PipelineInputs(WanPipeline, settings(tmp_path, **steps))
    # GLM-Image would integrate from one level and tell its network another, in rollout and replay alike
    trainer = trainer_for(tmp_path, name="glm_image", **steps)
    with pytest.raises(UnsupportedPipeline, match="sigmas: GlmImagePipeline"):
        trainer.train()


@pytest.mark.parametrize("only_samples", [False, True])
def test_advice_on_training_is_not_for_sampling(tmp_path, caplog, only_samples):
    """Who samples with the settings of a run trains no expert."""
    pipe, given = tiny_pipelines.build("wan_experts")
    fixed = {name: value for name, value in given.items() if name != "prompt"}
    args = settings(tmp_path, num_inference_steps=6, trained_steps=[0, 2], pipeline_kwargs=fixed)
    trial = PipelineInputs(pipe, args), DenoisingPolicy(pipe), [{"prompt": "a house"}], 0.7
    learn_forms(*trial, args if only_samples else None)
    assert ("transformer_2 will not be trained" in caplog.text) is not only_samples


@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (4, "RGBA")])
def test_images_have_the_mode_of_the_pipeline(tmp_path, channels, mode):
    """RGBA if its VAE has four channels, in settings as in columns, though both are checked before it is loaded."""
    given = {"image": Image.new("RGBA", (8, 8)), "mask_image": Image.new("L", (8, 8))}
    pipe = tiny_pipelines.build("sd15_inpaint")[0]
    pipe.vae.register_to_config(in_channels=channels)
    inputs = trainer_for(tmp_path, "sd15_inpaint", model=pipe, pipeline_kwargs=given).inputs
    assert (inputs.fixed["image"].mode, inputs.fixed["mask_image"].mode) == (mode, "L")
    dataset = Dataset.from_dict({"prompt": ["a"], "image": [given["image"]]})
    assert inputs.rows(dataset, [0])[0]["image"].mode == mode


def test_videos_made_from_videos_need_a_frame_rate(caplog):
    videos = Dataset.from_dict({"prompt": ["a"], "video": [str(__file__)]}).cast_column("video", Video())
    for settings, is_told in (({}, True), ({"fps": 8.0}, False)):
        caplog.clear()
        inputs = PipelineInputs(WanVideoToVideoPipeline, DiffusionGRPOConfig("runs", use_cpu=True, **settings))
        inputs.check(videos, "train_dataset")
        assert ("scored at 16 frames per second; set fps to the rate" in caplog.text) == is_told


def test_the_images_of_a_row_are_shown_in_their_order_and_masks_last():
    inputs = PipelineInputs(WanVACEPipeline, DiffusionGRPOConfig("runs", use_cpu=True))
    one, two, three, mask, other = (make_image(seed) for seed in range(5))
    row = {"mask": [mask, mask], "video": [one, two], "reference_images": [two, None, three], "target": other}
    found = inputs.find_images(row)
    assert sorted(map(id, found[:-2])) == sorted(map(id, [one, two, three])) and found[-2:] == [mask, mask]
    assert inputs.find_images({"prompt": "a"}) == []


def test_accepted_columns_become_keyword_arguments():
    rows = [
        {"prompt": "a", "negative_prompt": "x", "height": 64, "image": [1, 2], "color": "red", "image_2": None},
        {"prompt": "b", "negative_prompt": "", "height": 64, "image": [3, 4], "color": "blue", "image_2": None},
    ]
    accepted = {"prompt", "negative_prompt", "height", "image", "image_2", "width"}
    assert build_arguments(rows, accepted) == {
        "prompt": ["a", "b"],
        "negative_prompt": ["x", ""],
        "height": 64,
        "image": [[1, 2], [3, 4]],
    }


def test_classes_are_one_per_sample_where_other_numbers_are_one_per_call():
    rows = [{"class_labels": label, "guidance_scale": 4.0} for label in (3, 7)]
    assert group_by_shape(rows, set(rows[0])) == [[0, 1]]
    assert build_arguments(rows, set(rows[0])) == {"class_labels": [3, 7], "guidance_scale": 4.0}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("height", [64, 32, 64], r"'height' has different values in one pipeline call, \[32, 64\]"),
        ("guidance_scale", [4.5, 4.5, 7.0], r"'guidance_scale' has different values .* \[4.5, 7.0\]"),
        ("height", [64, None, 64], "'height' is None in 1 of the 3 rows"),
        ("negative_prompt", [None, "x", None], "'negative_prompt' is None in 2 of the 3 rows"),
    ],
)
def test_columns_that_one_call_cannot_take(name, values, message):
    with pytest.raises(ValueError, match=message):
        build_arguments([{"prompt": "a", name: value} for value in values], {"prompt", name})
