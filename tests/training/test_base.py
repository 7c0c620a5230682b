"""What transformers' Trainer forces: checkpoints that rotate, folders that are not overwritten."""

import contextlib
import json
import os
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny_runs import are_equal, brightness, finished_run, trained_weights, trainer_for
from transformers import Trainer, TrainerCallback

from diffusion_grpo import DiffusionGRPOTrainer
from diffusion_grpo.report.page import list_findings
from diffusion_grpo.report.record import ResumeError, write_json
from diffusion_grpo.report.run_folder import read_log_history, read_run
from tests.weights.test_files import collect_uploads


def test_a_checkpoint_of_another_folder_is_compared_with_the_run_there(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer_for(tmp_path / "a", **settings).train()
    point, longer = str(tmp_path / "a" / "checkpoint-1"), settings | {"max_steps": 2}
    other = trainer_for(tmp_path / "b", noise_level=0.3, **longer)
    with pytest.raises(ValueError, match="a contains another run .noise_level is .*resume with the settings of"):
        other.train(resume_from_checkpoint=point)
    same = trainer_for(tmp_path / "c", **longer)
    same.train(resume_from_checkpoint=point)
    assert same.state.global_step == 2
    (tmp_path / "a" / "run.json").unlink()
    other.train(resume_from_checkpoint=point)
    assert other.state.global_step == 2


def test_the_trained_network_is_compared_once_it_is_known(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer_for(tmp_path, **settings).train()
    record = json.loads((tmp_path / "run.json").read_text())
    write_json(tmp_path / "run.json", record | {"component": "text_encoder"})
    again = trainer_for(tmp_path, **settings, resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="component is"):
        again.train()


def test_evaluating_and_saving_before_training_and_after(tmp_path):
    """Before, the folder stays free; after, nothing of the run there changes until it is to be overwritten."""
    first = trainer_for(tmp_path, num_inference_steps=2)
    first.evaluate(), first.save_state(), first.save_model()
    first.train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert tmp_path / "evaluations" / "step-000000.parquet" in before
    again = trainer_for(tmp_path, num_inference_steps=2, seed=1)
    assert again.evaluate()["eval_reward"] > 0
    for resume in (None, True):  # there is no checkpoint to go on from
        with pytest.raises(ResumeError, match="overwrite_output_dir"):
            again.train(resume_from_checkpoint=resume)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_run_replaces_the_one_in_its_folder_if_asked_for(tmp_path):
    saved = {"num_inference_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": -1}
    trainer_for(tmp_path, **saved, max_steps=3, eval_on_start=True).train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    again = finished_run(tmp_path, **saved, max_steps=1, overwrite_output_dir=True)
    assert again.state.global_step == 1 and read_log_history(tmp_path) == again.state.log_history
    left = {path.name for path in tmp_path.rglob("*-*")}
    assert left == {"checkpoint-1", "rollout-rank0.safetensors", "step-000000", "step-000000.parquet"} & left
    assert not list(tmp_path.glob("evaluations/*"))  # none of the reward of then
    assert (
        trainer_for(tmp_path, **saved, overwrite_output_dir=True).train(resume_from_checkpoint=True).global_step == 2
    )
    assert (tmp_path / "checkpoint-1").is_dir()


def test_what_goes_missing_during_a_run_does_not_cost_its_weights(tmp_path, monkeypatch, caplog):
    """A reward changes the directory, and somebody tidies up: the best checkpoint and run.json are gone."""

    class Lose(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                os.chdir(tmp_path)
                shutil.rmtree(tmp_path / "work" / "run" / "checkpoint-1")
                (tmp_path / "work" / "run" / "run.json").unlink()

    def falling(images, trainer_state, **columns):
        return [value - trainer_state.global_step for value in brightness(images)]

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"load_best_model_at_end": True, "save_total_limit": 1, "num_inference_steps": 2}
    trainer = finished_run("run", rewards=falling, callbacks=[Lose()], **settings)
    trainer.save_model()
    assert "checkpoint-1 is gone" in caplog.text and trainer.state.best_model_checkpoint is None
    for name in ("adapter_model.safetensors", "run.json", "README.md", "checkpoint-2"):
        assert (tmp_path / "work" / "run" / name).exists()


def test_save_total_limit_and_the_best_model(tmp_path):
    """The second of four evaluations is the best: rotation spares its checkpoint, the run ends with its weights."""

    def scripted(images, trainer_state, **columns):
        best = 0.5 if trainer_state.global_step == 2 else 0.0
        return [best + value for value in brightness(images)]

    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    settings |= {"save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
    trainer = finished_run(tmp_path, rewards=scripted, greater_is_better=True, learning_rate=0.05, **settings)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    best, last = (load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 4))
    trained = {name.replace(".default", ""): value for name, value in trained_weights(trainer).items()}
    assert are_equal(trained, best) and not are_equal(trained, last)
    trainer.save_model()
    assert "the run went on to 4." in (tmp_path / "README.md").read_text()
    assert read_run(tmp_path).published_after == 2

    class Note(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            noted.append(read_run(tmp_path).published_after)

    noted = []
    trainer.add_callback(Note())
    trainer.args.max_steps = 5
    trainer.train(resume_from_checkpoint=True)
    assert noted == [None]  # these weights are on their way to others


def test_a_guard_ends_the_run_at_its_best_evaluation_before(tmp_path, caplog):
    """The reward rises; what is only evaluated falls after update 2, and the run of six updates ends there."""

    def scripted(images, trainer_state, **columns):
        return [trainer_state.global_step + value for value in brightness(images)]

    def watched(images, trainer_state, **columns):
        return [value - (trainer_state.global_step > 2) for value in brightness(images)]

    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 6, "learning_rate": 0.05}
    settings |= {"stop_when": {"eval_rewards/watched/mean": 2, "diversity": 0.1}, "save_strategy": "steps"}
    trainer = trainer_for(tmp_path, rewards=scripted, eval_reward_funcs=watched, **settings)
    for resumed in (None, True):  # its log says so again
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.global_step == (4 if resumed else 3)
        best = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
        trained = {name.replace(".default", ""): value for name, value in trained_weights(trainer).items()}
        assert are_equal(trained, best)
    assert caplog.text.count("eval_rewards/watched/mean fell") == 2 and "after 2 updates" in caplog.text
    trainer.save_model()
    assert "eval_rewards/watched/mean fell" in (tmp_path / "README.md").read_text().replace("\\", "")
    run = read_run(tmp_path)
    assert run.published_after == 2 and any("watched/mean fell" in sentence for sentence in list_findings(run))


def test_full_training_saves_a_whole_pipeline_where_it_is_told_to(tmp_path):
    settings = {"lora": False, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = finished_run(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "checkpoint-1" / "model_index.json").exists()  # only what is trained
    trainer.save_model(str(tmp_path / "mine"))
    saved = DiffusionPipeline.from_pretrained(tmp_path / "mine").transformer.state_dict()
    trained = trained_weights(trainer)
    assert trained and all(torch.equal(value, saved[name]) for name, value in trained.items())


def test_what_is_given_for_the_card_reaches_it_and_the_push(tmp_path, monkeypatch):
    pushed, asked = collect_uploads(monkeypatch, is_done=True), []
    monkeypatch.setattr("diffusion_grpo.training.base.check_hub_access", asked.append)
    trainer = trainer_for(tmp_path, hub_model_id="mine", hub_token="hf_1")
    trainer.create_model_card("My model", tags="anime", language=["en", "fr"])
    assert "# My model\n" in (tmp_path / "README.md").read_text()
    with pytest.raises(TypeError, match="dataset_nam"):
        trainer.push_to_hub(dataset_nam="x")
    assert not pushed and trainer.hub_model_id is None
    trainer.push_to_hub(dataset_name="me/prompts", license="mit")
    assert asked == ["hf_1"] * 2  # before anything is written or pushed
    assert len(pushed) == 1
    card = ModelCard.load(tmp_path / "README.md").data.to_dict()
    assert card["datasets"] == ["me/prompts"] and card["license"] == "mit" and card["language"] == ["en", "fr"]
    assert card["tags"][-1] == "anime" and card["tags"].count("diffusion-grpo") == 1


@pytest.mark.parametrize("has_scaler", [True, False])
def test_the_loss_scale_is_restored_where_the_engine_comes_after_the_weights(tmp_path, monkeypatch, has_scaler):
    """As with FSDP2, which scales the loss, and DeepSpeed, which keeps a scale of its own."""
    trainer = trainer_for(tmp_path / "run")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if has_scaler else None
    torch.save(torch.amp.GradScaler("cpu", init_scale=512.0).state_dict(), tmp_path / "scaler.pt")
    trainer.accelerator.scaler = scaler
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(Trainer, "_prepare_for_training", lambda *args: ("model", "data"))
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler"):
        monkeypatch.setattr(trainer, name, lambda checkpoint: None)
    assert trainer._prepare_for_training(1, None, str(tmp_path)) == ("model", "data")
    assert not has_scaler or scaler.state_dict()["scale"] == 512.0


def test_a_resumed_run_has_its_own_learning_rate(tmp_path):
    """run.json and the card name the one of the settings. The schedule of the ended run has fallen to 0."""
    settings = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "lr_scheduler_type": "linear"}
    trainer_for(tmp_path, **settings, max_steps=2, learning_rate=1e-3, weight_decay=0.1).train()
    used, rate = [], 1e-2

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            used.append(optimizer.param_groups[0]["lr"])

    own = {"max_steps": 4, "learning_rate": rate, "weight_decay": 0.2, "callbacks": [Watch()]}
    resumed = finished_run(tmp_path, **settings, **own, resume_from_checkpoint=True)
    assert used == pytest.approx([0.5 * rate, 0.25 * rate])
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "learning_rate" in entry]
    assert rates[2:] == pytest.approx([0.5 * rate, 0.25 * rate]) and max(rates[:2]) <= 1e-3
    (group,) = [group for group in resumed.optimizer.param_groups if group["weight_decay"]]
    assert group["weight_decay"] == 0.2 and group["initial_lr"] == rate


def test_a_method_that_is_never_called_cannot_be_overridden():
    with pytest.raises(TypeError, match="Mine overrides compute_loss.*training_step"):

        class Mine(DiffusionGRPOTrainer):
            def compute_loss(self, *args, **kwargs):
                return 0 * super().compute_loss(*args, **kwargs)

    class Allowed(DiffusionGRPOTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)


def test_batches_of_ones_own_and_searches_are_refused(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader([{"prompt": "a cat"}] * 8)
    with pytest.raises(TypeError, match="train_dataset"):
        trainer.train()
    with pytest.raises(NotImplementedError, match="a trainer per trial"):
        trainer.hyperparameter_search()


@pytest.mark.parametrize("name", ["eval_own", "ovn"])
def test_the_best_metric_may_be_one_that_an_own_evaluate_adds(tmp_path, name):
    """A name that no evaluation has ends the run before its first update. Gradients may be off around the run."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "metric_for_best_model": name}
    trainer = trainer_for(tmp_path, eval_on_start=True, **settings)
    evaluate, before = trainer.evaluate, trained_weights(trainer)
    trainer.evaluate = lambda **kwargs: evaluate(**kwargs) | {"eval_own": 2.0}
    is_known = name == "eval_own"
    refused = contextlib.nullcontext() if is_known else pytest.raises(ValueError, match="metric_for_best.*'eval_own'")
    with torch.no_grad(), refused:
        trainer.train()
    assert trainer.state.best_metric == (2.0 if is_known else None)
    assert are_equal(before, trained_weights(trainer)) != is_known
