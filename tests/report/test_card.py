"""The model card: what it says of a run, and that what others named stands for itself in it."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_pipelines
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from run_folders import make_run
from tiny_runs import finished_run

from diffusion_grpo.media.files import write_sound, write_video
from diffusion_grpo.report.card import (
    CardDetails,
    code,
    escape,
    list_upload_patterns,
    name_repository,
    write_card_samples,
    write_model_card,
)
from diffusion_grpo.report.record import save_settings
from diffusion_grpo.report.run_folder import read_run


@pytest.mark.plots
def test_the_card_of_a_run(tmp_path):
    """Of a local base model, whose folder on this machine it does not name."""
    base = tmp_path / "base" / "my-model"
    tiny_pipelines.build("sd3")[0].save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    trainer = finished_run(tmp_path / "run", model=str(base), eval_strategy="steps", eval_steps=1, eval_on_start=True)
    trainer.save_model()
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert card.data.library_name == "diffusers" and card.data.pipeline_tag == "text-to-image"
    assert card.data.license == "mit" and card.data.base_model is None
    parts = ["| brightness | 1.0 |", '"num_generations": 4', "LoRA rank 4", "for 2 updates.", "started from Python"]
    parts += [
        "| before training | after 2 updates |",
        "2 held-out prompts",
        "pipe.load_lora_weights",
        "grid.png",
        "curve.png",
    ]
    parts += ['from_pretrained("my-model", dtype=torch.float32)  # a folder on the machine that trained it']
    parts += ["![before training](images/0-before.png)"]
    assert [part for part in parts if part not in card.content] == []
    assert Image.open(tmp_path / "run" / "curve.png").width > 500 and (tmp_path / "run/images/0-after.png").is_file()
    assert card.data.widget[0] == {"text": "held out", "output": {"url": "images/0-after.png"}}
    for file in ("README.md", "run.json", "summary.json"):
        assert str(tmp_path) not in (tmp_path / "run" / file).read_text(), file
    assert "<h1>my-model learns brightness</h1>" in (tmp_path / "run" / "report.html").read_text()


def test_the_card_of_the_embedded_model_loads_it_by_its_path_and_names_the_method(tmp_path):
    history = [{"step": 1, "eval_reward": 0.5}]  # one evaluation, one number
    write_model_card(tmp_path, RUN | {"model": "tiny", "settings": {"loss_type": "nft"}}, history, updates=1)
    card = (tmp_path / "README.md").read_text()
    assert "DiffusionPipeline.from_pretrained(tiny.PATH)" in card and "| reward | weight | after 1 update |" in card
    assert "The method: [DiffusionNFT](https://huggingface.co/papers/2509.16117)." in card


@pytest.mark.parametrize("text", ["# Mine\n", "---\ntags: [lora]\n---\nMine\n", "---\ntags: [\n---\nMine\n"])
def test_a_readme_that_somebody_wrote_stays(tmp_path, caplog, text):
    write_model_card(tmp_path, RUN, [], 0)
    written = (tmp_path / "README.md").read_text()
    for there, expected in ((text, text), (f"{written}more", written)):
        (tmp_path / "README.md").write_text(there)
        write_model_card(tmp_path, RUN, [], 0)
        assert (tmp_path / "README.md").read_text() == expected
    assert caplog.text.count("was not written by a run") == 1


EVIL = "a|b](javascript:x) <script>*"
RUN = {
    "model": "/home/me/base `model`\n---\n# not a heading",
    "trains_by": "LoRA rank 4",
    "pipeline": "SomePipeline",
    "component": "transformer",
    "loads_by": "load_lora_weights",
    "evaluation_call": {"inputs": ["prompt"], "arguments": {"num_inference_steps": 4}},
    "prompts": {"train": 2, "eval": 0, "eval_in_train": None},
    "reward_funcs": [EVIL],
    "eval_reward_funcs": ["judge_of_two"],
    "reward_weights": [1.0],
    "settings": {"validation_prompts": ["```\n# a prompt\n---\n<b>"]},
    "versions": {"torch": "2"},
}


def test_what_others_named_stands_for_itself_in_the_card(tmp_path):
    folder = tmp_path / 'run "x"'
    folder.mkdir()
    write_model_card(folder, RUN, [], updates=3, details=CardDetails(model_name="my <b>run</b>\n# and more"))
    for model in ("../away", "a b/c", "x/y: z"):  # no repositories
        write_model_card(tmp_path, RUN | {"model": model}, [], updates=3)
        assert "base_model" not in ModelCard.load(tmp_path / "README.md").data.to_dict()
    text = (folder / "README.md").read_text()
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict().get("base_model") is None and card.data.library_name == "diffusers"
    lines = card.content.splitlines()
    for line in (
        "# my \\<b\\>run\\</b\\> \\# and more",
        "| a\\|b\\](javascript:x) \\<script\\>\\* | 1.0 |",
        "| judge_of_two | only evaluated |",
    ):
        assert line in lines
    assert "SomePipeline ``/home/me/base `model` --- # not a heading``, its transformer trained" in text
    assert lines.count("---") == 2 and text.count("```") == 5 and text.count("\n```") == 4
    assert 'pipe.load_lora_weights("run \\"x\\"")' in lines
    code = text.split("```python\n")[1].split("\n```")[0]
    compile(code, "card", "exec")


DETAILED = RUN | {"model": "a/b", "pipeline_tag": "text-to-image", "settings": {}}
OTHER = {"license": "other", "license_name": "flux", "license_link": "https://somewhere"}


def write(folder, **given):
    write_model_card(folder, DETAILED | {"license": OTHER}, [], updates=1, details=CardDetails().add(**given))
    return ModelCard.load(folder / "README.md")


def test_what_is_given_stands_in_the_header_and_the_text(tmp_path):
    given = {"dataset_name": "me/prompts", "license": "mit", "language": "en", "tasks": "image-to-image"}
    card = write(tmp_path, model_name="My *model*", tags=["anime", "grpo"], finetuned_from="c/d", **given)
    data = card.data.to_dict()
    assert data["datasets"] == ["me/prompts"] and data["language"] == ["en"] and data["license"] == "mit"
    assert "license_name" not in data and "license_link" not in data  # those of the base model's licence
    assert data["tags"] == ["diffusion-grpo", "grpo", "reinforcement-learning", "lora", "anime"]
    assert data["base_model"] == "c/d" and data["base_model_relation"] == "adapter"
    assert data["pipeline_tag"] == "image-to-image" and data["library_name"] == "diffusers"
    assert "# My \\*model\\*" in card.content
    assert "The prompts are from [me/prompts](https://huggingface.co/datasets/me/prompts)." in card.content
    card = write(tmp_path)  # without details the run speaks
    data = card.data.to_dict()
    assert {name: data[name] for name in OTHER} == OTHER and data["base_model"] == "a/b"
    assert not {"datasets", "language"} & data.keys() and "The prompts are from" not in card.content


def test_datasets_without_a_page_on_the_hub_stand_in_the_text_alone(tmp_path):
    (tmp_path / "prompts.txt").write_text("a")
    card = write(tmp_path, dataset_name=[str(tmp_path / "prompts.txt"), "<all> mine"])
    assert "datasets" not in card.data.to_dict()
    assert "The prompts are from prompts.txt, \\<all\\> mine." in card.content
    card = write(tmp_path, dataset_tags=["me/a", "me/b"], dataset="Signs")
    assert card.data.datasets == ["me/a", "me/b"]
    links = "[me/a](https://huggingface.co/datasets/me/a), [me/b](https://huggingface.co/datasets/me/b)"
    assert f"The prompts are from Signs ({links})." in card.content


def card_of(run):
    write_model_card(run.path, RUN | run.info, run.evaluations, run.updates)
    return ModelCard.load(run.path / "README.md")


def test_the_first_prompts_are_shown_before_and_after(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=6, size=(1024, 512)))
    pairs = write_card_samples(run)
    assert [pair["prompt"] for pair in pairs] == [f'the word "WORD{index}" in red' for index in range(4)]
    files = [pair[when]["image"] for pair in pairs for when in ("before", "after")]
    assert sorted(path.name for path in (run.path / "images").iterdir()) == sorted(Path(file).name for file in files)
    shown = Image.open(run.path / pairs[1]["after"]["image"])
    assert shown.size == (512, 256)
    source = Image.open(run.path / "evaluations" / "step-000020" / "0001.png").resize((512, 256))
    assert np.abs(np.asarray(shown, dtype=float) - np.asarray(source, dtype=float)).mean() < 3
    card = card_of(run)
    assert card.data.widget[1] == {"text": 'the word "WORD1" in red', "output": {"url": "images/1-after.png"}}
    images = "![before training](images/0-before.png) 0.400 | ![after 20 updates](images/0-after.png) 0.900 |"
    assert images in card.content


def test_videos_and_sounds_lie_behind_their_images(tmp_path):
    path = make_run(tmp_path / "run", prompts=2, eval_every=20)
    for step in (0, 20):
        folder, table = f"step-{step:06d}", path / "evaluations" / f"step-{step:06d}.parquet"
        write_video([Image.new("RGB", (16, 16))] * 3, path / "evaluations" / folder / "0000.mp4", 8)
        write_sound(np.zeros(100), path / "evaluations" / folder / "0001.wav", 8000)
        rows = pyarrow.parquet.read_table(table).to_pylist()
        rows[0]["file"], rows[1]["file"] = (f"evaluations/{folder}/{name}" for name in ("0000.mp4", "0001.wav"))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    run = read_run(path)
    card = card_of(run)
    assert "[![after 20 updates](images/0-after.png)](images/0-after.mp4)" in card.content
    assert (path / "images" / "0-before.mp4").is_file() and (path / "images" / "1-after.wav").is_file()
    assert [entry["output"]["url"] for entry in card.data.widget] == ["images/0-after.mp4"]  # the Hub shows no sound


def test_images_of_an_earlier_card_are_removed_and_other_files_stay(tmp_path):
    run = read_run(make_run(tmp_path / "run", prompts=1))
    others = ["photo.png", "0-before.txt", "a0-after.png", "deep/1-after.png"]
    for name in [*others, "3-after.png"]:
        (run.path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / "images" / name).write_text("mine")
    for _ in range(2):
        write_card_samples(run)
        assert all((run.path / "images" / name).read_text() == "mine" for name in others)
    assert {path.name for path in (run.path / "images").glob("[0-9]-*.png")} == {"0-before.png", "0-after.png"}
    assert write_card_samples(read_run(make_run(tmp_path / "none", updates=5))) == []


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (escape, "a|b <i> # x", "a\\|b \\<i\\> \\# x"),
        (escape, "snake_case stays, _this_ does not", "snake_case stays, \\_this\\_ does not"),
        (escape, "two\nlines\tand\x00more", "two lines and more"),
        (escape, "[a](b) `c` $d$ &amp; !", "\\[a\\](b) \\`c\\` \\$d\\$ \\&amp; \\!"),
        (code, "a b", "`a b`"),
        (code, "a`b", "``a`b``"),
        (code, "`a``", "``` `a`` ```"),  # a span has more backquotes than its text
        (code, "", "`  `"),
    ],
)
def test_special_characters_stand_for_themselves(form, text, expected):
    assert form(text) == expected


FILES = """README.md curve.png grid.png train.yaml run.json images/0-before.mp4 images/0-after.png images/0-input.png
adapter_config.json pytorch_lora_weights.safetensors policy/adapter_model.safetensors model_index.json
transformer/config.json tokenizer/vocab.json scheduler/scheduler_config.json""".split()
PRIVATE = """report.html trainer_state.json samples/step-000000/0000.png samples/step-000000.parquet prompts.txt
evaluations/step-000000/0000.png runs/Nov01_my-host/events.out.tfevents.1.my-host.2.0 images/photo.png""".split()
NEVER = """checkpoint-2/pytorch_lora_weights.safetensors tmp-checkpoint-3/config.json
abandoned/after-2/checkpoint-3/pytorch_lora_weights.safetensors policy/pytorch_lora_weights.safetensors
policy/transformer_2/pytorch_lora_weights.safetensors""".split()


@pytest.mark.parametrize("push_samples", [False, True])
def test_what_is_published(push_samples):
    patterns = list_upload_patterns(["transformer", "tokenizer", "scheduler"], push_samples)
    pushed = set(filter_repo_objects([*FILES, *PRIVATE, *NEVER], **patterns))
    assert pushed == {*FILES, *(PRIVATE if push_samples else [])}


def test_a_repository_without_its_namespace_is_no_place_to_load_from():
    assert name_repository(None, None) is None and name_repository(None, "mine") is None
    assert name_repository(None, "me/mine") == name_repository("me/mine", "mine") == "me/mine"


def test_the_command_fetches_the_settings_where_they_are_published(tmp_path):
    save_settings(tmp_path, {"model": "tiny", "dataset": "words.txt", "reward_funcs": ["text"]})
    assert "\ndiffusion-grpo train train.yaml\n" in write(tmp_path).content
    write_model_card(tmp_path, DETAILED, [], updates=1, repository="me/mine")
    text = (tmp_path / "README.md").read_text()
    assert "\nhf download me/mine train.yaml --local-dir mine\ndiffusion-grpo train mine/train.yaml\n" in text
    (tmp_path / "train.yaml").unlink()
    write_model_card(tmp_path, DETAILED | {"command": "python train.py"}, [], updates=1)
    assert "\npython train.py\n" in (tmp_path / "README.md").read_text()
