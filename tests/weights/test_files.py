"""What is saved is loaded by plain diffusers, and makes the same image."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from diffusers.loaders import lora_base
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_runs import brightness, finished_run, first_frame_brightness, train_and_compare, trainer_for
from torch import nn

from diffusion_grpo.report.card import list_upload_patterns
from diffusion_grpo.training.model import load_plain_pipeline
from diffusion_grpo.weights import files as hub
from diffusion_grpo.weights import lora as adapters


def draw_sample(pipe, inputs, output_type="np"):
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    with tiny_pipelines.on_equal_terms(pipe):
        images = pipe(**inputs, num_inference_steps=3, generator=generators, output_type=output_type)[0]
    return torch.as_tensor(images)


def draw_with(load, folder, name="sd3", **options):
    """What a new pipeline draws with weights that `load(pipe, folder)` has put into it."""
    pipe, inputs = tiny_pipelines.build(name)
    load(pipe, folder)
    return draw_sample(pipe, inputs, **options)


def load_plainly(pipe, folder):
    pipe.load_lora_weights(folder)


def first_number(completions, **columns):
    return [float(torch.as_tensor(completion).float().mean()) for completion in completions]


def save_experts(folder):
    """Write a LoRA of both experts of Wan 2.2 that is not zero, and return what the pipeline draws with it."""
    pipe, inputs = tiny_pipelines.build("wan_experts")
    names = ("transformer", "transformer_2")
    config = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: get_peft_model(getattr(pipe, name), config) for name in names})
    hub.save_policy(model, pipe, names, folder)
    return draw_sample(pipe, inputs)


def put_on_hub(monkeypatch, repository, cache):
    """Let every Hub id name the folder `repository`; only what is asked for is copied to `cache`."""

    def snapshot_download(name, allow_patterns):
        files = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / file, cache / file)
        return str(cache)

    def hf_hub_download(name, file):
        if not (repository / file).is_file():
            raise EntryNotFoundError(f"{name} has no {file}")
        snapshot_download(name, allow_patterns=[file])
        return str(cache / file)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "hf_hub_download", hf_hub_download)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_a_lora_in_plain_diffusers_makes_the_identical_image(tmp_path, name):
    trainer = finished_run(tmp_path, name=name, learning_rate=0.02)
    trainer.save_model()
    fresh, inputs = tiny_pipelines.build(name)
    trained = draw_sample(trainer.pipe, inputs)
    assert torch.equal(draw_with(load_plainly, tmp_path, name), trained)
    assert not torch.allclose(draw_sample(fresh, inputs), trained, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "component", "settings"),
    [
        ("sd15", "unet", {"target_modules": ["to_q", "to_k", "conv1", "conv_shortcut", "time_emb_proj"]}),
        ("sd15", "unet", {"target_modules": ["to_q", "conv1"], "use_dora": True}),
        ("sdxl", "unet", {"target_modules": "all-linear", "use_rslora": True}),
        ("sdxl", "unet", {"target_modules": ["to_q", "proj_out"], "rank_pattern": {"to_q": 2}, "lora_alpha": 3}),
        ("sd3", "transformer", {"target_modules": ["to_q", "proj_out", "norm1.linear"], "alpha_pattern": {"to_q": 1}}),
    ],
)
def test_a_lora_of_any_layers_in_plain_diffusers_makes_the_identical_image(tmp_path, name, component, settings):
    pipe, inputs = tiny_pipelines.build(name)
    config = LoraConfig(r=4, **settings)
    torch.manual_seed(0)
    model = get_peft_model(getattr(pipe, component), config)
    for key, weights in model.named_parameters():
        if "lora_B" in key:
            weights.data.normal_(std=0.1)
    hub.save_policy(model, pipe, (component,), tmp_path)
    trained = draw_sample(pipe, inputs)
    assert torch.equal(draw_with(load_plainly, tmp_path, name), trained)
    assert not torch.allclose(draw_sample(*tiny_pipelines.build(name)), trained, atol=1e-3)


def test_the_loras_of_two_experts_in_plain_diffusers(tmp_path):
    """Wan 2.2: both experts learn, and diffusers takes each one's LoRA from where the card says."""
    trainer = trainer_for(
        tmp_path, name="wan_experts", rewards=first_frame_brightness, num_inference_steps=6, learning_rate=0.02
    )
    assert {name.split(".")[0] for name in train_and_compare(trainer)} == {"transformer", "transformer_2"}
    trainer.save_model()
    fresh, inputs = tiny_pipelines.build("wan_experts")
    fresh.load_lora_weights(tmp_path)
    one_expert = draw_sample(fresh, inputs)
    fresh.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    trained = draw_sample(trainer.pipe, inputs)
    assert torch.equal(draw_sample(fresh, inputs), trained) and not torch.equal(one_expert, trained)
    assert "load_into_transformer_2=True" in (tmp_path / "README.md").read_text()
    assert torch.equal(draw_with(hub.load_weights, tmp_path, "wan_experts"), trained)


def test_the_loras_of_two_experts_from_the_hub(tmp_path, monkeypatch):
    """By the id alone both are loaded, and of what else was pushed nothing is fetched."""
    pushed, cache = tmp_path / "pushed", tmp_path / "cache"
    expected = save_experts(pushed)
    needed = {str(path.relative_to(pushed)) for path in pushed.rglob("*.*")} - {"README.md", "transformer_2/README.md"}
    assert len(needed) == 6
    for extra in ("samples/1.mp4", "last-checkpoint/adapter_model.safetensors", "transformer_2/optimizer.pt"):
        (pushed / extra).parent.mkdir(exist_ok=True)
        (pushed / extra).write_bytes(b"large")
    (pushed / "run.json").write_text('{"component": "transformer, transformer_2"}')
    put_on_hub(monkeypatch, pushed, cache)
    fresh, inputs = tiny_pipelines.build("wan_experts")
    hub.load_weights(fresh, "me/wan-lora", adapter_name="mine")
    assert adapters.list_adapters(fresh) == {"transformer": ["mine"], "transformer_2": ["mine"]}
    assert torch.equal(draw_sample(fresh, inputs), expected)
    fetched = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
    assert fetched == needed | {"run.json"}


def test_a_pushed_lora_of_the_second_expert_goes_into_the_second_expert(tmp_path, monkeypatch):
    """Of what a push publishes without `push_samples`, run.json alone names the network."""
    run, pushed = tmp_path / "run", tmp_path / "pushed"
    pipe, inputs = tiny_pipelines.build("wan_experts")
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    hub.save_policy(get_peft_model(pipe.transformer_2, config), pipe, ("transformer_2",), run)
    (run / "run.json").write_text('{"component": "transformer_2"}')
    expected = draw_sample(pipe, inputs)
    files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    for file in filter_repo_objects(files, **list_upload_patterns(pipe.components, push_samples=False)):
        (pushed / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / file, pushed / file)
    put_on_hub(monkeypatch, pushed, tmp_path / "cache")
    fresh, inputs = tiny_pipelines.build("wan_experts")
    hub.load_weights(fresh, "me/wan-lora", adapter_name="mine")
    assert adapters.list_adapters(fresh) == {"transformer_2": ["mine"]}
    assert torch.equal(draw_sample(fresh, inputs), expected)


def test_another_lora_on_the_hub_is_left_to_the_pipeline(tmp_path, monkeypatch):
    (pushed := tmp_path / "pushed").mkdir()
    for file in ("adapter_config.json", "style.safetensors"):
        (pushed / file).write_text("{}")
    put_on_hub(monkeypatch, pushed, tmp_path / "cache")
    pipe, _ = tiny_pipelines.build("sd3")
    loaded = []
    monkeypatch.setattr(pipe, "load_lora_weights", lambda source, adapter_name: loaded.append((source, adapter_name)))
    hub.load_weights(pipe, "someone/style", adapter_name="style")
    assert loaded == [("someone/style", "style")]


def test_the_hub_is_not_asked_for_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "hf_hub_download", lambda *args: pytest.fail(f"{args} asked for"))
    monkeypatch.chdir(tmp_path)
    Path("runs/here").mkdir(parents=True)
    pipe, _ = tiny_pipelines.build("sd3")
    for source in ("runs/here", "./gone", "~/gone", "/gone", "runs/gone/checkpoint-1", "gone", Path("runs/gone")):
        assert hub.fetch_lora(pipe, source) is None


PEFT = 'PeftModel.from_pretrained(pipe.transformer, "{folder}")'
OF_THE_NETWORK = f'pipe.prior.load_lora_adapter("{{folder}}", prefix=None, weight_name="{hub.LORA_WEIGHTS}")'


@pytest.mark.parametrize(
    ("name", "rewards", "line"),
    [
        ("pixart", brightness, PEFT),  # has no LoRA loader in diffusers
        ("kandinsky_prior", first_number, OF_THE_NETWORK),  # the prior's network has one
    ],
)
def test_a_lora_that_the_pipeline_does_not_load(tmp_path, name, rewards, line):
    """The card names what loads it instead, and the image is identical."""
    trainer = finished_run(tmp_path, name=name, rewards=rewards, learning_rate=0.02)
    trainer.save_model()
    fresh, inputs = tiny_pipelines.build(name)
    before, trained = (draw_sample(pipe, inputs, output_type="pt") for pipe in (fresh, trainer.pipe))
    card = (tmp_path / "README.md").read_text()
    assert line.format(folder=tmp_path.name) in card and "load_lora_weights" not in card
    exec(line.format(folder=tmp_path), {"PeftModel": PeftModel, "pipe": fresh})
    assert torch.equal(draw_sample(fresh, inputs, output_type="pt"), trained) and not torch.equal(before, trained)
    assert torch.equal(draw_with(hub.load_weights, tmp_path, name, output_type="pt"), trained)


def save_lora(folder, name, component="transformer"):
    """Write a LoRA that is not zero, whose scale is 4, and return what the pipeline draws with it."""
    pipe, inputs = tiny_pipelines.build(name)
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_k"], init_lora_weights=False)
    model = get_peft_model(getattr(pipe, component), config)
    hub.save_policy(model, pipe, (component,), folder)
    return draw_sample(pipe, inputs)


@pytest.mark.parametrize(("name", "component"), [("flux2", "transformer"), ("sd15", "unet")])
def test_pefts_file_of_a_lora_is_loaded_with_its_scale(tmp_path, name, component):
    expected = save_lora(tmp_path, name, component)
    assert torch.equal(draw_with(hub.load_weights, tmp_path / hub.ADAPTER_WEIGHTS, name), expected)
    (tmp_path / hub.ADAPTER_CONFIG).unlink()
    with pytest.raises(ValueError, match=hub.ADAPTER_CONFIG):
        hub.load_weights(tiny_pipelines.build(name)[0], tmp_path / hub.ADAPTER_WEIGHTS)


@pytest.mark.parametrize("file", [hub.ADAPTER_WEIGHTS, hub.LORA_WEIGHTS, "other.safetensors"])
def test_a_lora_of_which_the_network_takes_a_part_is_refused(tmp_path, file):
    """As of a deeper variant, or with layers that another program names in its own way."""
    save_lora(tmp_path, "sd3")
    state = load_file(tmp_path / (hub.ADAPTER_WEIGHTS if file == hub.ADAPTER_WEIGHTS else hub.LORA_WEIGHTS))
    state = {name.replace("transformer_blocks.1.", "transformer_blocks.7."): value for name, value in state.items()}
    if file != "other.safetensors":
        for path in tmp_path.iterdir():
            if path.name not in (file, hub.ADAPTER_CONFIG) or file == hub.LORA_WEIGHTS:
                path.unlink()
    save_file(state, tmp_path / file, metadata={"format": "pt"})
    fresh, inputs = tiny_pipelines.build("sd3")
    before = draw_sample(fresh, inputs)
    with pytest.raises(ValueError, match="only .* of its .* layers"):
        hub.load_weights(fresh, tmp_path / file)
    assert torch.equal(draw_sample(fresh, inputs), before) and not adapters.list_adapters(fresh)


@pytest.mark.parametrize("file", [hub.ADAPTER_WEIGHTS, hub.LORA_WEIGHTS])
def test_a_lora_of_another_model_is_refused_in_one_sentence(tmp_path, file):
    save_lora(tmp_path, "sdxl", "unet")
    if file == hub.LORA_WEIGHTS:
        (tmp_path / hub.ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ValueError, match="does not fit StableDiffusionPipeline") as error:
        hub.load_weights(tiny_pipelines.build("sd15")[0], tmp_path)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 600


def test_a_folder_whose_weights_are_a_variant(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.to(dtype=torch.float16).save_pretrained(tmp_path / "half", variant="fp16", max_shard_size="50KB")
    assert hub.find_variant(tmp_path / "half") == "fp16"
    loaded = load_plain_pipeline(str(tmp_path / "half"), "float32")
    assert torch.equal(loaded.transformer.proj_out.weight, pipe.transformer.proj_out.weight.float())
    pipe.save_pretrained(tmp_path / "half")
    assert hub.find_variant(tmp_path / "half") is None


EXPERTS = {"name": "wan_experts", "rewards": first_frame_brightness, "num_inference_steps": 6}
EXPERTS |= {"lora": False, "learning_rate": 0.01, "ema_decay": 0.5, "ema_update_interval": 1}


def test_full_training_of_two_experts(tmp_path):
    """Checkpoint, average and final save hold both, and plain diffusers loads them."""
    trainer = trainer_for(tmp_path, **EXPERTS, save_strategy="steps", save_steps=2)
    assert {name.split(".")[0] for name in train_and_compare(trainer)} == {"transformer", "transformer_2"}
    trainer.save_model()
    _, inputs = tiny_pipelines.build("wan_experts")
    average = draw_sample(trainer.pipe, inputs)
    with trainer.learner.average.place(is_shown=False):
        policy = draw_sample(trainer.pipe, inputs)
    whole = DiffusionPipeline.from_pretrained(tmp_path)
    whole.set_progress_bar_config(disable=True)
    assert torch.equal(draw_sample(whole, inputs), average) and not torch.equal(average, policy)
    for place, expected in (("checkpoint-2", average), ("checkpoint-2/policy", policy), ("policy", policy)):
        fresh, _ = tiny_pipelines.build("wan_experts")
        for name in ("transformer", "transformer_2"):
            setattr(fresh, name, WanTransformer3DModel.from_pretrained(tmp_path / place / name))
        assert torch.equal(draw_sample(fresh, inputs), expected), place
        assert torch.equal(draw_with(hub.load_weights, tmp_path / place, "wan_experts"), expected), place


def load_from(folder: Path) -> DiffusionPipeline:
    """A tiny pipeline that was saved to a folder and is loaded from there."""
    tiny_pipelines.build("sd3")[0].save_pretrained(folder)
    return DiffusionPipeline.from_pretrained(folder)


def list_leaks(root: Path, text: str) -> list[Path]:
    """The files under a folder that hold a text."""
    return [path for path in root.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("place", "name"),
    [("jane/my-model", "my-model"), ("jane/models--some--model/snapshots/abc", "some/model")],
)
def test_saved_files_name_the_base_model_and_no_folder(tmp_path, place, name):
    pipe, saved = load_from(tmp_path / place), tmp_path / "saved"
    hub.save_policy(pipe.transformer, pipe, ("transformer",), saved / "whole", whole_pipeline=True)
    hub.save_policy(pipe.transformer, pipe, ("transformer",), saved / "part")
    lora = get_peft_model(pipe.text_encoder, LoraConfig(r=2, target_modules=["q_proj"]))
    hub.save_policy(lora, pipe, ("text_encoder",), saved / "lora")
    assert list_leaks(saved, "jane") == []
    for file in ("whole/model_index.json", "whole/transformer/config.json", "whole/vae/config.json"):
        assert json.loads((saved / file).read_text())["_name_or_path"] == name, file
    assert json.loads((saved / "part/transformer/config.json").read_text())["_name_or_path"] == name
    adapter = json.loads((saved / "lora/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == name
    assert lora.peft_config["default"].base_model_name_or_path == str(tmp_path / place / "text_encoder")
    hub.load_policy(lora, ("text_encoder",), saved / "lora")
    hub.load_policy(pipe.transformer, ("transformer",), saved / "part")
    again = DiffusionPipeline.from_pretrained(saved / "whole")
    assert all(value.equal(again.vae.state_dict()[key]) for key, value in pipe.vae.state_dict().items())
    assert again.transformer.config.patch_size == pipe.transformer.config.patch_size


def test_a_run_of_a_local_model_publishes_no_folder_and_goes_on(tmp_path):
    run, settings = tmp_path / "run", {"lora": False, "save_strategy": "steps", "save_steps": 1}
    model = tmp_path / "jane" / "my-model"
    trainer_for(run, model=load_from(model), max_steps=1, **settings).train()
    trainer = trainer_for(run, model=DiffusionPipeline.from_pretrained(model), resume_from_checkpoint=True, **settings)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    assert trainer.state.global_step == 2
    files = [str(path.relative_to(run)) for path in list_leaks(run, "jane")]
    assert list(filter_repo_objects(files, **list_upload_patterns(trainer.pipe.components, push_samples=True))) == []


def test_what_was_measured_is_what_is_published(tmp_path, monkeypatch):
    """Top of the folder, `trainer.pipe` and card have the average's weights; the policy's own are in a subfolder."""
    trainer = finished_run(tmp_path, ema_decay=0.5, ema_update_interval=1, learning_rate=0.05, max_steps=3)
    trainer.save_model()
    _, inputs = tiny_pipelines.build("sd3")
    average, policy = (draw_with(load_plainly, folder) for folder in (tmp_path, tmp_path / "policy"))
    with trainer.learner.average.place(is_shown=True):
        measured = draw_sample(trainer.pipe, inputs)
    assert torch.equal(draw_sample(trainer.pipe, inputs), measured)
    assert torch.allclose(average, measured, atol=1e-5) and not torch.allclose(policy, measured, atol=1e-3)
    with trainer.learner.average.place(is_shown=False):
        assert torch.allclose(policy, draw_sample(trainer.pipe, inputs), atol=1e-5)
    card = (tmp_path / "README.md").read_text()
    assert "moving average of the policy (`ema_decay` 0.5)" in card and "`policy` contains the policy itself" in card
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    for push_samples in (False, True):
        pushed = filter_repo_objects(files, **list_upload_patterns(trainer.pipe.components, push_samples))
        siblings = [SimpleNamespace(rfilename=file) for file in sorted(pushed)]
        assert "policy/adapter_model.safetensors" in [file.rfilename for file in siblings]
        monkeypatch.setattr(lora_base, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(lora_base, "model_info", lambda name, found=siblings: SimpleNamespace(siblings=found))
        assert lora_base._best_guess_weight_name("me/run") == "pytorch_lora_weights.safetensors"  # of two, the first


def collect_uploads(monkeypatch, is_done):
    """Return the uploads to a stand-in for the Hub's client: nothing leaves the machine."""
    uploads = []

    class Client:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, folder_path, allow_patterns=None, ignore_patterns=None, **kwargs):
            files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
            pushed = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
            uploads.append(kwargs | {"files": sorted(pushed)})
            return SimpleNamespace(done=lambda: is_done, is_done=lambda: is_done, result=lambda: None)

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    monkeypatch.setattr("transformers.trainer.hf_api", Client)
    monkeypatch.setattr("diffusion_grpo.training.base.hf_api", Client)
    monkeypatch.setattr("diffusion_grpo.training.base.check_hub_access", lambda token: None)
    return uploads


@pytest.mark.parametrize("push_samples", [False, True])
def test_push_to_hub_uploads_the_weights_and_the_card(tmp_path, monkeypatch, push_samples):
    made = collect_uploads(monkeypatch, is_done=True)
    trainer = finished_run(
        tmp_path,
        push_to_hub=True,
        hub_model_id="mine",
        hub_strategy="checkpoint",
        save_strategy="steps",
        save_steps=1,
        report_to="tensorboard",
        push_samples=push_samples,
    )
    trainer.push_to_hub()
    uploads = [(upload.get("path_in_repo"), upload["files"]) for upload in made]
    assert any(path == "last-checkpoint" and "optimizer.pt" in files for path, files in uploads)
    path, files = uploads[-1]
    assert path is None and {"README.md", "pytorch_lora_weights.safetensors", "adapter_model.safetensors"} <= set(
        files
    )
    assert "training_args.bin" not in files and not [file for file in files if file.startswith("checkpoint-")]
    assert all("run.json" in pushed for path, pushed in uploads if path is None)  # it names the network of the LoRA
    for start in ("samples/", "runs/", "report.html", "trainer_state.json"):
        assert bool([file for file in files if file.startswith(start)]) == push_samples, start
    for path, pushed in uploads:  # those during the training too
        assert path is not None or push_samples or not [file for file in pushed if file.startswith("samples/")]
    card = (tmp_path / "README.md").read_text()
    assert 'pipe.load_lora_weights("me/mine")' in card and "# mine\n" in card and "folder that holds" not in card


@pytest.mark.parametrize(
    ("settings", "folders"),
    [
        ({"hub_strategy": "every_save"}, [None]),  # the first is still under way when the second would begin
        ({"hub_strategy": "all_checkpoints", "hub_always_push": True}, [None, "checkpoint-1", None, "checkpoint-2"]),
    ],
    ids=str,
)
def test_settings_of_the_hub_reach_it(tmp_path, monkeypatch, settings, folders):
    uploads = collect_uploads(monkeypatch, is_done=False)
    saves = {"save_strategy": "steps", "save_steps": 1, "num_inference_steps": 2, "gradient_accumulation_steps": 1}
    hub_settings = {"push_to_hub": True, "hub_model_id": "mine", "hub_token": "hf_mine", "hub_revision": "trial"}
    trainer = trainer_for(tmp_path, **saves, **hub_settings, **settings)
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
    trainer.train()
    during = [upload for upload in uploads if "in progress" in upload["commit_message"]]
    assert [upload.get("path_in_repo") for upload in during] == folders
    assert {(upload["token"], upload["revision"]) for upload in during} <= {("hf_mine", "trial")}
    trainer.push_to_hub()
    assert uploads[-1]["token"] == "hf_mine" and uploads[-1]["revision"] == "trial"
