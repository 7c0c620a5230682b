"""`diffusion-grpo sample`: rollouts without training, from a model or from the settings of a run."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tiny_pipelines
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from quantized import INT8, save_pipeline
from safetensors.torch import load_file, save_file
from tiny_runs import trainer_for

from diffusion_grpo import cli
from diffusion_grpo.data.inputs import PipelineInputs
from diffusion_grpo.media.files import read_video
from diffusion_grpo.rollout.plan import SamplingPlan
from diffusion_grpo.sampling import sample
from diffusion_grpo.sampling.settings import SampleSettings, read_settings
from diffusion_grpo.training.block_swap import find_hook
from diffusion_grpo.weights.lora import list_adapters
from diffusion_grpo.weights.quantization import describe_quantization

PROMPTS = ["a red fox", "a blue house", "a tree"]
SIZE = ["--height", "16", "--width", "16", "--num_inference_steps", "3"]
SIZE += ["--guidance_scale", "1", "--pipeline_kwargs", '{"max_sequence_length": 8}']


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny pipelines, by name."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("sd3", "wan"):
        tiny_pipelines.build(name)[0].save_pretrained(folder / name)
    return folder


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return str(tmp_path / "prompts.txt")


@pytest.fixture
def words(models, prompts):
    """Of a job of the tiny Stable Diffusion 3."""
    return [models / "sd3", "--prompts", prompts, *SIZE]


def run(*words, code=0):
    assert cli.main(["sample", *map(str, words)]) == code


def settings_of(*words):
    return read_settings(*cli.build_parser().parse_known_args(["sample", *map(str, words)]))


def table_of(folder):
    return pyarrow.parquet.read_table(folder / "samples.parquet").to_pylist()


def pixels(folder, row):
    return np.asarray(Image.open(folder / row["file"])).astype(int)


REWARDS = ["--reward_funcs", "{brightness: 2.0, jpeg_compressibility: {weight: 0.1}}"]


def test_groups_get_rewards_advantages_and_a_summary(words, models, tmp_path, capsys):
    run(*words, *REWARDS, "--num_generations", 3, "--output_dir", tmp_path / "out", "--batch_size", 4)
    rows = table_of(tmp_path / "out")
    assert [row["prompt"] for row in rows] == [prompt for prompt in PROMPTS for _ in range(3)]
    assert [row["seed"] for row in rows] == list(range(9))
    assert len({pixels(tmp_path / "out", row).tobytes() for row in rows}) == 9
    reward = np.array([2 * row["brightness"] + 0.1 * row["jpeg_compressibility"] for row in rows])
    assert [row["reward"] for row in rows] == pytest.approx(reward.tolist(), rel=1e-5)
    group = reward.reshape(3, 3)
    expected = (group - group.mean(1, keepdims=True)) / group.std(1, ddof=1, keepdims=True)
    assert [row["advantage"] for row in rows] == pytest.approx(expected.flatten().tolist(), abs=1e-3)
    values = np.array([row["brightness"] for row in rows])
    error = values.reshape(3, 3).mean(1).std(ddof=1) / 3**0.5  # over the prompts
    line = f"{'brightness':<16} {values.mean():.3f} ± {error:.3f}"
    assert line in (printed := capsys.readouterr().out) and "9 samples of 3 prompts" in printed
    job = json.loads((tmp_path / "out" / "sample.json").read_text())
    assert job["height"] == 16 and job["seed"] == 0 and job["model"] == str(models / "sd3")


def test_a_stopped_job_goes_on_and_makes_nothing_twice(words, tmp_path, monkeypatch):
    words += ["--num_generations", 2, "--batch_size", 2, "--reward_funcs", "brightness"]
    run(*words, "--output_dir", tmp_path / "whole")
    real, made = sample.Sampler.__call__, []

    def dies(self, rows, places):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.extend(places)
        return real(self, rows, places)

    monkeypatch.setattr(sample.Sampler, "__call__", dies)
    run(*words, "--output_dir", tmp_path / "out", code=130)
    kept = (tmp_path / "out" / "0001.png").stat().st_mtime_ns
    monkeypatch.setattr(sample.Sampler, "__call__", lambda *args: made.extend(args[2]) or real(*args))
    run(*words, "--output_dir", tmp_path / "out")
    assert made == list(range(6)) and (tmp_path / "out" / "0001.png").stat().st_mtime_ns == kept
    assert table_of(tmp_path / "out") == table_of(tmp_path / "whole")
    run(*words, "--output_dir", tmp_path / "out")  # there is nothing left to do
    assert made == list(range(6))


def test_another_jobs_folder_and_other_prompts_are_refused(words, prompts, tmp_path, capsys):
    words += ["--output_dir", tmp_path / "out"]
    run(*words, "--max_prompts", 1)
    run(*words, "--max_prompts", 2)  # more of the same
    assert len(table_of(tmp_path / "out")) == 2
    run(*words, "--seed", 5, code=2)
    assert "seed is 0 there and 5 here" in capsys.readouterr().err
    Path(prompts).write_text("a dog\n")
    run(*words, code=2)
    assert "in row 0" in capsys.readouterr().err


def test_noise_is_that_of_a_rollout_and_0_is_none(words, tmp_path):
    noise, made = ["--noise_level", 0.7], {}
    ways = {"none": [], "noisy": noise, "alone": [*noise, "--batch_size", 1], "other": [*noise, "--sde_type", "cps"]}
    for name, options in ways.items():
        run(*words, "--max_prompts", 1, "--num_generations", 2, "--output_dir", tmp_path / name, *options)
        made[name] = [pixels(tmp_path / name, row) for row in table_of(tmp_path / name)]
    assert np.abs(np.subtract(made["noisy"], made["alone"])).max() <= 1  # seeds do not depend on the batch
    images = {name: found[0] for name, found in made.items()}
    for other in (images["none"], images["other"], made["noisy"][1]):
        assert np.abs(images["noisy"] - other).mean() > 1
    pipe, _ = tiny_pipelines.build("sd3")
    plain = pipe("a red fox", height=16, width=16, num_inference_steps=3, guidance_scale=1.0, max_sequence_length=8,
                 generator=torch.Generator().manual_seed(0)).images[0]  # fmt: skip
    assert np.abs(images["none"] - np.asarray(plain).astype(int)).max() <= 1


@pytest.fixture
def training(models, prompts, tmp_path):
    """A YAML file of a run on videos."""
    settings = {
        "model": str(models / "wan"),
        "dataset": prompts,
        "reward_funcs": {"brightness": {"frames": 1}},
        "eval_reward_funcs": ["motion"],
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_generations": 2,
        "num_inference_steps": 3,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "guidance_scale": 3.0,
        "pipeline_kwargs": {"max_sequence_length": 32},
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "train.yaml"


def test_the_settings_of_a_run_are_those_of_its_rollouts(training, tmp_path):
    run(training, "--output_dir", tmp_path / "out", "--max_prompts", 2)
    rows = table_of(tmp_path / "out")
    assert [row["file"] for row in rows] == ["0000.mp4", "0001.mp4", "0002.mp4", "0003.mp4"]
    videos = [np.stack([np.asarray(frame).astype(int) for frame in read_video(tmp_path / "out" / row["file"])])
              for row in rows]  # fmt: skip
    assert videos[0].shape == (5, 32, 32, 3) and np.abs(videos[0] - videos[1]).mean() > 1  # the steps' noise
    assert {"brightness", "motion", "reward", "advantage"} <= set(rows[0])
    assert rows[0]["advantage"] == pytest.approx(-rows[1]["advantage"], abs=1e-3) and rows[0]["advantage"] != 0
    assert not (tmp_path / "run").exists()
    # one initial latent a group, by default: almost without the steps' noise its samples are almost one
    apart = {}
    for name, options in (("shared", []), ("own", ["--samples_per_latent", "1"])):
        run(training, "--output_dir", tmp_path / name, "--max_prompts", 1, "--noise_level", 1e-4, *options)
        one, other = (np.asarray(Image.open(tmp_path / name / f"000{place}.png")).astype(int) for place in (0, 1))
        apart[name] = np.abs(one - other).mean()
    assert apart["shared"] < 0.1 < 0.5 < apart["own"]


def test_a_run_on_a_quantised_base_is_sampled_with_it(training, tmp_path):
    settings = yaml.safe_load(training.read_text()) | {"model": str(save_pipeline(tmp_path / "sd3")), "use_peft": True}
    training.write_text(yaml.safe_dump(settings | {"quantization": INT8, "num_frames": None}))
    pipe = sample.load_pipeline_to_sample(settings_of(training))
    assert describe_quantization(pipe) == dict.fromkeys(INT8, "torchao")


@pytest.mark.parametrize(
    ("added", "offloads", "swaps"),
    [
        ({"cache_prompt_embeds": "memory"}, True, False),
        ({"group_offload": "block_level", "use_peft": True, "offload_frozen": "cpu"}, True, True),
    ],
    ids=str,
)
def test_a_run_that_saves_memory_is_sampled_with_as_little(training, tmp_path, added, offloads, swaps):
    run(training, "--output_dir", tmp_path / "plain", "--max_prompts", 1)
    training.write_text(yaml.safe_dump(yaml.safe_load(training.read_text()) | added))
    pipe = sample.load_pipeline_to_sample(settings_of(training))
    assert hasattr(pipe.vae, "_hf_hook") == offloads
    assert (find_hook(pipe.transformer.blocks[0]) is not None) == swaps
    run(training, "--output_dir", tmp_path / "saving", "--max_prompts", 1)
    for one, other in zip(table_of(tmp_path / "plain"), table_of(tmp_path / "saving"), strict=True):
        assert one["brightness"] == other["brightness"] and one["motion"] == other["motion"]


def test_a_rate_that_replaces_a_column_of_rates_is_accepted(tmp_path):
    tiny_pipelines.build("ltx")[0].save_pretrained(tmp_path / "ltx")
    dataset = Dataset.from_dict({"prompt": ["a"], "frame_rate": [25]})
    settings = SampleSettings(str(tmp_path / "ltx"), "x.jsonl", "test", tmp_path / "out")
    with pytest.raises(ValueError, match="column 'frame_rate': all videos of a run have the same frames per second"):
        sample.check_inputs(settings, dataset, [])
    sample.check_inputs(dataclasses.replace(settings, pipeline_kwargs={"frame_rate": 12}), dataset, [])


def test_a_lora_in_pefts_layout_is_loaded(training, models, tmp_path):
    pipe, _ = tiny_pipelines.build("wan")
    config = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    get_peft_model(pipe.transformer, config).save_pretrained(tmp_path / "peft")
    (tmp_path / "further.yaml").write_text(training.read_text() + f"lora_path: {tmp_path / 'peft'}\n")
    lora = ["--lora", tmp_path / "peft"]
    for words in ([tmp_path / "further.yaml"], [training, *lora], [models / "wan", "--prompts", "tiny", *lora]):
        assert list(list_adapters(sample.load_pipeline_to_sample(settings_of(*words)))) == ["transformer"]


def test_a_window_that_moves_with_the_rollouts_does_so_here(training):
    settings = settings_of(training, "--num_inference_steps", 6, "--num_trained_steps", 2)
    sampler = sample.Sampler(tiny_pipelines.build("wan")[0], settings)
    rollout = settings.train.batch_sizes.prompts_per_rollout * settings.num_generations
    expected = [SamplingPlan(settings.train).draw_steps(generation) for generation in range(8)]
    assert sampler.choose_noise_steps([generation * rollout for generation in range(8)]) == expected
    assert len(set(expected)) > 1 and all(len(steps) == 2 for steps in expected)


def test_samples_have_the_latents_and_windows_of_the_trainings_branches(training, monkeypatch):
    words = ["--num_inference_steps", 7, "--num_generations", 4, "--per_device_train_batch_size", 16]
    words += ["--trained_steps", 1, 5, "--num_trained_steps", 1, "--step_selection", "prompt"]
    settings, asked = settings_of(training, *words, "--samples_per_latent", 2), {}
    sampler = sample.Sampler(tiny_pipelines.build("wan")[0], settings)
    monkeypatch.setattr(sample, "rollout", lambda *args, **given: asked.update(given) or ([None] * 12, None))
    sampler([{"prompt": "a fox"}] * 12, list(range(12)))
    seeds = asked["initial_seeds"]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 6 and len(set(asked["seeds"])) == 12
    plan = SamplingPlan(settings.train)
    expected = [plan.draw_steps(0, prompt) for prompt in (0, 1, 2) for _ in range(4)]
    assert asked["noise_steps"] == expected and len(set(expected)) > 1


def test_what_is_noised_after_its_rollout_is_sampled_without_noise(training):
    """By the pipeline's own scheduler, as those rollouts are."""
    for loss in ("nft", "draft"):
        assert settings_of(training, "--loss_type", loss, "--samples_per_latent", 1).noise_level == 0.0
    assert settings_of(training).noise_level != 0.0


def test_options_replace_columns_and_a_negative_prompt_is_given_to_each_sample(tmp_path, monkeypatch):
    """Stable Diffusion takes no single negative prompt for a list of prompts."""
    pipe, _ = tiny_pipelines.build("sd15")
    pipe.save_pretrained(tmp_path / "model")
    rows = [{"prompt": prompt, "negative_prompt": "a frame", "height": 32} for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    real, calls = type(pipe).__call__, []
    monkeypatch.setattr(type(pipe), "__call__", functools.wraps(real)(
        lambda *args, **given: calls.append(given) or real(*args, **given)))  # fmt: skip
    words = ["--prompts", tmp_path / "rows.jsonl", "--num_inference_steps", 2, "--height", 16, "--width", 16]
    words += ["--pipeline_kwargs", '{"negative_prompt": "blurry"}', "--output_dir", tmp_path / "out"]
    run(tmp_path / "model", *words)
    [given] = calls
    assert (given["prompt"], given["negative_prompt"], given["height"]) == (PROMPTS, ["blurry"] * 3, 16)


def test_an_input_named_as_a_column_of_ours_is_kept(models, tmp_path):
    columns = {"words": ["a fox"], "image": ["fox.png"], "level": [3], "reward": [7], "advantage": [8]}
    Dataset.from_dict(columns).with_format("torch").save_to_disk(tmp_path / "data")  # keeps the format
    words = [models / "sd3", "--prompts", tmp_path / "data", *SIZE, "--reward_funcs", "brightness"]
    words += ["--prompt_column", "words"]
    run(*words, "--output_dir", tmp_path / "out", "--num_generations", 2)
    for number, row in enumerate(table_of(tmp_path / "out")):
        assert (row["prompt"], row["image"], row["level"]) == ("a fox", f"000{number}.png", 3)
        assert row["input_image"] == "fox.png"
        assert (row["input_reward"], row["input_advantage"], row["reward"]) == (7, 8, row["brightness"])


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_a_checkpoint_is_sampled_with(words, tmp_path, lora):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "learning_rate": 0.02}
    trainer = trainer_for(tmp_path / "run", lora=lora, **settings)
    trainer.train()
    words += ["--max_prompts", 1]
    run(*words, "--output_dir", tmp_path / "base")
    run(*words, "--output_dir", tmp_path / "trained", "--lora", tmp_path / "run" / "checkpoint-1")
    base, trained = (pixels(tmp_path / name, table_of(tmp_path / name)[0]) for name in ("base", "trained"))
    pipe = trainer.pipe
    expected = pipe("a red fox", height=16, width=16, num_inference_steps=3, guidance_scale=1.0, max_sequence_length=8,
                    generator=torch.Generator().manual_seed(0)).images[0]  # fmt: skip
    assert np.array_equal(trained, np.asarray(expected).astype(int)) and not np.array_equal(base, trained)


def test_what_cannot_be_sampled_is_refused(words, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for options, expected in (
        (["--lora", tmp_path / "empty"], "holds neither a LoRA nor a network of StableDiffusion3Pipeline"),
        (["--num_frames", 5], "does not take num_frames"),
    ):
        run(*words, *options, code=2)
        assert expected in capsys.readouterr().err


def test_a_reward_that_compares_all_samples_gets_all_or_is_refused(words, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from diffusion_grpo.rewards import batchwise\n\n"
        "@batchwise\ndef count(images):\n    return [float(len(images))] * len(images)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words += ["--reward_funcs", "mine.count", "--num_generations", 2]
    run(*words, "--batch_size", 4, code=2)
    assert "'count' compares all 6 samples" in capsys.readouterr().err
    words += ["--batch_size", 6, "--output_dir", tmp_path / "out"]
    run(*words)
    assert [row["count"] for row in table_of(tmp_path / "out")] == [6.0] * 6
    run(*words)  # nothing is left to score
    run(*words, "--max_prompts", 2, code=2)
    assert "'count' compares all 4 samples" in capsys.readouterr().err


def test_images_are_edited_one_by_one_where_no_run_has_asked_the_pipeline(tmp_path, monkeypatch):
    """A list of images may be several of one sample. Images of each size give samples of their size."""
    tiny_pipelines.build("sd15_img2img")[0].save_pretrained(tmp_path / "model")
    lines, calls = [], []
    for name, side in (("a", 16), ("b", 24), ("c", 16)):
        Image.effect_noise((side, side), 80).convert("RGB").save(tmp_path / f"{name}.png")
        lines.append(json.dumps({"prompt": "a fox", "image": f"{name}.png"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(PipelineInputs, "check_samples", lambda self, samples, count, arguments: calls.append(count))
    words = ["--prompts", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out", "--num_inference_steps", 4]
    run(tmp_path / "model", *words)
    sizes = [Image.open(tmp_path / "out" / row["image"]).size for row in table_of(tmp_path / "out")]
    assert sizes == [(16, 16), (24, 24), (16, 16)] and calls == [1, 1, 1]


def test_what_a_pipeline_needs_in_these_versions_is_there_without_a_trainer(tmp_path, monkeypatch):
    """GLM-Image's image-to-image, whose plain call fails in diffusers 0.42."""
    pipe, inputs = tiny_pipelines.build("glm_image_edit")
    monkeypatch.setattr(sample, "load_pipeline_to_sample", lambda settings: pipe)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "GlmImagePipeline"}))
    inputs["image"][0][0].save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a fox", "image": "a.png"}))
    size = ["--height", 64, "--width", 64, "--num_inference_steps", 2]
    run(tmp_path, "--prompts", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out", *size)
    assert Image.open(tmp_path / "out" / table_of(tmp_path / "out")[0]["image"]).size == (64, 64)


def test_changed_weights_and_columns_are_another_job(prompts, tmp_path, capsys):
    trainer_for(tmp_path / "run", lora=True, max_steps=1).save_model()
    tiny_pipelines.build("sd3")[0].save_pretrained(tmp_path / "model")
    words = [tmp_path / "model", "--max_prompts", 1, *SIZE, "--output_dir"]
    with_lora = [*words, tmp_path / "out", "--prompts", prompts, "--lora", tmp_path / "run"]
    run(*with_lora)
    (tmp_path / "run" / "checkpoint-1").mkdir()
    (tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors").write_bytes(b"a later one")
    run(*with_lora)
    file = tmp_path / "run" / "adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    run(*with_lora, code=2)
    assert "contains samples of another job (lora_weights is" in capsys.readouterr().err
    rows = tmp_path / "rows.jsonl"
    with_columns = [*words, tmp_path / "columns", "--prompts", rows, "--reward_funcs", "brightness"]
    rows.write_text('{"prompt": "a fox", "level": 1}\n{"prompt": "a cat", "level": 1}\n')
    run(*with_columns, "--max_prompts", 2)
    run(*with_columns)
    rows.write_text('{"prompt": "a fox", "level": 1}\n{"prompt": "a cat", "level": 2}\n')
    run(*with_columns)  # the changed row is not asked for
    run(*with_columns, "--max_prompts", 2, code=2)
    assert "in row 1" in capsys.readouterr().err


def test_fewer_prompts_have_their_own_summary_and_the_table_stays(words, tmp_path, capsys):
    words += [*REWARDS, "--num_generations", 2]
    run(*words, "--output_dir", tmp_path / "alone", "--max_prompts", 1)
    alone = capsys.readouterr().out.splitlines()[:3]
    run(*words, "--output_dir", tmp_path / "out")
    assert capsys.readouterr().out.splitlines()[:3] != alone
    before = table_of(tmp_path / "out")
    run(*words, "--output_dir", tmp_path / "out", "--max_prompts", 1)
    assert capsys.readouterr().out.splitlines()[:3] == alone
    assert table_of(tmp_path / "out") == before and len(before) == 6


@pytest.mark.parametrize(("name", "noise"), [("wan_image", ["--noise_level", "0.7"]), ("wan_vace", [])])
def test_pipelines_that_take_one_sample_at_a_time_are_sampled_from(name, noise, tmp_path, caplog):
    """Without the settings of a run, no trial call has found out that they refuse lists."""
    tiny_pipelines.build(name)[0].save_pretrained(tmp_path / "model")
    Image.effect_noise((16, 16), 80).convert("RGB").save(tmp_path / "a.png")
    rows = [{"prompt": prompt} | ({"image": "a.png"} if name == "wan_image" else {}) for prompt in ("a fox", "a cat")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--prompts", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out", "--num_inference_steps", 3]
    run(tmp_path / "model", *words, *noise, "--height", 16, "--width", 16, "--num_frames", 5)
    table = table_of(tmp_path / "out")
    assert [row["prompt"] for row in table] == ["a fox", "a cat"]
    assert "takes these samples only one by one" in caplog.text
    assert all(len(read_video(tmp_path / "out" / row["file"])) == 5 for row in table)
