"""The model card: what it says of a run, and that what others named stands for itself in it."""

import pytest
import tiny_pipelines
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig
from PIL import Image
from tiny_runs import LORA, SETTINGS, brightness, trainer_for

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.run.card import write_model_card
from diffusion_grpo.run.card_details import CardDetails


@pytest.mark.plots
def test_the_model_card(tmp_path):
    trainer = trainer_for(tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    trainer.run["model"] = "someone/some-model"
    trainer.train()
    trainer.save_model()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "diffusers" and card.data.base_model == "someone/some-model"
    for part in (
        "| brightness | 1.0 |",
        "grid.png",
        "curve.png",
        '"num_generations": 4',
        "pipe.load_lora_weights",
        "LoRA rank 4",
    ):
        assert part in card.content, part
    assert Image.open(tmp_path / "curve.png").width > 500
    assert card.data.pipeline_tag == "text-to-image" and card.data.license is None
    assert "for 2 updates." in card.content and "| before training | after 2 updates |" in card.content
    assert f"`{tmp_path.name}` is the folder that holds this file" in card.content
    assert "The first 2 samples of the evaluations" in card.content  # several may share a prompt
    assert "![before training](images/0-before.png)" in card.content and (tmp_path / "images/0-after.png").is_file()
    assert card.data.widget[0] == {"text": "held out", "output": {"url": "images/0-after.png"}}
    assert "It was started from Python" in card.content and "diffusion-grpo 0.1.0, torch " in card.content
    assert "2 held-out prompts, none of which is trained on" in card.content


def test_the_card_of_a_local_base_model_names_no_folder_of_this_machine(tmp_path):
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.save_pretrained(tmp_path / "base" / "my-model")
    (tmp_path / "base" / "my-model" / "README.md").write_text("---\nlicense: mit\n---\n")
    settings = SETTINGS | {"height": 16, "width": 16, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = DiffusionGRPOTrainer(
        model=str(tmp_path / "base" / "my-model"),
        reward_funcs=brightness,
        args=DiffusionGRPOConfig(str(tmp_path / "run"), **settings, pipeline_kwargs={"max_sequence_length": 8}),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        eval_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    trainer.save_model()
    card = ModelCard.load(tmp_path / "run" / "README.md")
    line = 'from_pretrained("my-model", dtype=torch.float32)  # a folder on the machine that trained it'
    assert line in card.content and card.data.license == "mit" and card.data.base_model is None
    assert "| reward | weight | after 1 update |" in card.content  # one evaluation, one number
    for file in ("README.md", "run.json", "summary.json"):
        assert str(tmp_path) not in (tmp_path / "run" / file).read_text(), file
    assert "<h1>my-model learns brightness</h1>" in (tmp_path / "run" / "report.html").read_text()


def test_the_card_of_the_embedded_model_loads_it_by_its_path_and_names_the_method(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1, loss_type="nft")
    trainer.run["model"] = "tiny"
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "DiffusionPipeline.from_pretrained(tiny.PATH)" in card
    assert "trained with DiffusionNFT by" in card
    assert "The method: [DiffusionNFT](https://huggingface.co/papers/2509.16117)." in card


@pytest.mark.parametrize("text", ["# Mine\n", "---\ntags: [lora]\n---\nMine\n", "---\ntags: [\n---\nMine\n"])
def test_a_readme_that_somebody_wrote_stays(tmp_path, caplog, text):
    trainer = trainer_for(tmp_path / "run")
    write_model_card(tmp_path, {**trainer.run, "model": "tiny"}, [], 0)
    written = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text(text)
    write_model_card(tmp_path, {**trainer.run, "model": "tiny"}, [], 0)
    assert (tmp_path / "README.md").read_text() == text and "was not written by a run" in caplog.text
    (tmp_path / "README.md").write_text(f"{written}more")
    write_model_card(tmp_path, {**trainer.run, "model": "tiny"}, [], 0)
    assert (tmp_path / "README.md").read_text() == written


EVIL = "a|b](javascript:x) <script>*"
RUN = {
    "model": "/home/me/base `model`\n---\n# not a heading",
    "trains_by": "LoRA rank 4",
    "pipeline": "SomePipeline",
    "component": "transformer",
    "reward_funcs": [EVIL],
    "eval_reward_funcs": ["judge_of_two"],
    "reward_weights": [1.0],
    "settings": {"validation_prompts": ["```\n# a prompt\n---\n<b>"]},
    "versions": {"torch": "2"},
}


def test_what_others_named_stands_for_itself_in_the_card(tmp_path):
    folder = tmp_path / 'run "x"'
    folder.mkdir()
    write_model_card(folder, RUN, [], updates=3, details=CardDetails(title="my <b>run</b>\n# and more"))
    text = (folder / "README.md").read_text()
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict().get("base_model") is None and card.data.library_name == "diffusers"
    lines = card.content.splitlines()
    assert "# my \\<b\\>run\\</b\\> \\# and more" in lines
    assert "| a\\|b\\](javascript:x) \\<script\\>\\* | 1.0 |" in lines
    assert "| judge_of_two | only evaluated |" in lines
    assert "SomePipeline ``/home/me/base `model` --- # not a heading``, its transformer trained" in text
    assert lines.count("---") == 2 and text.count("```") == 5 and text.count("\n```") == 4
    assert 'pipe.load_lora_weights("run \\"x\\"")' in lines
    code = text.split("```python\n")[1].split("\n```")[0]
    compile(code, "card", "exec")


@pytest.mark.parametrize("model", ["../away", "a b/c", "x/y: z"])
def test_a_base_model_that_is_no_repository_is_not_linked(tmp_path, model):
    write_model_card(tmp_path, RUN | {"model": model}, [], updates=3)
    assert "base_model" not in ModelCard.load(tmp_path / "README.md").data.to_dict()
