"""The trainer on tiny random pipelines: what it promises while it runs."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tiny_pipelines
import torch
from datasets import Dataset
from PIL import Image
from tiny_runs import (
    OPTIONAL,
    PROMPTS,
    are_equal,
    brightness,
    finished_run,
    first_frame_brightness,
    logged,
    read_table,
    train_and_compare,
    trained_weights,
    trainer_for,
)
from transformers import TrainerCallback

from diffusion_grpo.data.columns import RowError
from diffusion_grpo.policy.base import UntrainedStepError
from diffusion_grpo.policy.rollout import replay
from diffusion_grpo.policy.trajectory import Trajectory
from diffusion_grpo.rewards import RewardError
from diffusion_grpo.rollout.plan import SamplingPlan
from diffusion_grpo.trainer import NonFiniteError, RatioError


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": False, "beta": 0.1, "offload_ref_model": True},
        {"lora": False, "kl_reward": 0.5},
        {"gradient_checkpointing": True, "bf16": True},
        {"samples_per_latent": "group"},
        {"num_inference_steps": 6, "trained_steps": [1, 4], "noisy_steps": "trained"},
        {"offload_trajectories": True, "scale_rewards": "batch", "sde_type": "cps"},
        {"name": "sd15", "beta": 0.1},
        {"name": "wan", "loss_type": "dppo", "step_weight": "velocity"},
    ],
    ids=str,
)
def test_the_first_ratio_is_one_and_the_weights_move(tmp_path, settings):
    rewards = first_frame_brightness if settings.get("name") == "wan" else brightness
    trainer = trainer_for(tmp_path, rewards=rewards, **settings)
    assert train_and_compare(trainer)
    exact = not settings.get("bf16")
    assert max(logged(trainer, "ratio/max_error")) <= (0.0 if exact else 1e-5)
    assert len(logged(trainer, "loss")) == 2 and all(np.isfinite(logged(trainer, "loss")))
    assert all(sample.means is None for sample in trainer.loader.buffer.samples)  # of one update per rollout


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_batch_size": 3, "best_of_n": 2},
        {"old_log_prob": "replay", "rollout_batch_size": 8, "num_trained_steps": 2, "step_selection": "sample"},
    ],
    ids=str,
)
def test_other_batches_in_rollout_and_update_stay_close(tmp_path, settings):
    trainer = finished_run(tmp_path, **settings)
    assert max(logged(trainer, "ratio/max_error")) <= 1e-5


def test_chunks_of_the_rollout_do_not_change_the_samples(tmp_path):
    rewards = []
    for size in (1, 8):
        finished_run(tmp_path / str(size), rollout_batch_size=size, max_steps=1)
        table = read_table(tmp_path / str(size))
        rewards.append((table["prompt"], table["seed"], table["brightness"]))
    assert rewards[0][:2] == rewards[1][:2]
    assert np.allclose(rewards[0][2], rewards[1][2], atol=1e-4) and np.std(rewards[0][2]) > 1e-3


def test_a_rollout_used_again_is_off_policy_and_the_clip_acts(tmp_path):
    own = {"num_iterations": 2, "epsilon": 1e-6, "epsilon_high": 2e-6}
    trainer = finished_run(tmp_path, max_steps=4, learning_rate=0.02, **own)
    clipped = logged(trainer, "clip_ratio/region_mean")
    assert clipped[0] == clipped[2] == 0.0  # a new rollout every second update
    assert min(clipped[1], clipped[3]) > 0.1
    assert len(list((tmp_path / "samples").glob("*.parquet"))) == 2


@pytest.mark.parametrize("anchor", ["auto", "replay"])
def test_several_updates_per_rollout(tmp_path, anchor):
    trainer = finished_run(tmp_path, steps_per_generation=4, old_log_prob=anchor, max_steps=4)
    assert len(list((tmp_path / "samples").glob("*.parquet"))) == 2
    means = logged(trainer, "ratio/mean")
    assert means[0] == means[2] == 1.0 and means[1] != 1.0


def assert_gradient(trainer, update, objective):
    """Train, and compare an update's gradient with autograd's of `objective`, the sum over both micro-batches.

    `objective` gets the ratios (samples, steps) and the advantages of a micro-batch.
    """
    compared = []

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step != update:
                return
            total, trained = 0.0, [parameter for parameter in model.parameters() if parameter.requires_grad]
            for rows in (slice(0, 4), slice(4, 8)):
                (part,) = trainer.loader.buffer.part(rows).parts
                now = [replay(trainer.policy, part.inputs, part.trajectory, step).log_prob for step in (0, 1, 2)]
                total = total + objective((torch.stack(now, 1) - part.trajectory.log_probs).exp(), part.advantages)
            compared.extend(zip([p.grad.clone() for p in trained], torch.autograd.grad(total, trained), strict=True))

    trainer.add_callback(Compare)
    trainer.train()
    assert any(gradient.abs().max() > 0 for gradient, _ in compared)
    for gradient, expected in compared:
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-8)


def test_ratios_of_whole_trajectories(tmp_path):
    """The second update's gradient is that of GSPO's objective, written out for the whole rollout at once."""
    settings = {"importance_sampling_level": "sequence", "num_iterations": 2, "learning_rate": 0.02}
    trainer = trainer_for(tmp_path, **settings, max_steps=2, max_grad_norm=0, epsilon=1e-3)

    def objective(ratios, advantages):
        ratio = ratios.log().mean(1).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 1e-3, 1 + 1e-3)).mean() / 2

    assert_gradient(trainer, 1, objective)


@pytest.mark.parametrize("loss_type", ["grpo_guard", "dppo"])
def test_old_means_are_those_of_the_policy_that_rolled_out(tmp_path, loss_type):
    """Replayed in the batches that are trained, or as recorded: in float32 the same, and so are the updates."""
    settings = {"steps_per_generation": 4, "num_iterations": 2, "loss_type": loss_type, "max_steps": 4}
    runs = []
    for anchor in ("auto", "rollout"):
        trainer = trainer_for(tmp_path / anchor, old_log_prob=anchor, **settings)
        expected = []
        trainer.add_callback(KeepFirstMeans(trainer, expected))
        trainer.train()
        kept = torch.cat([sample.means for sample in trainer.loader.buffer.samples])
        assert kept.dtype == torch.float32 and torch.equal(kept, torch.cat(expected))
        divergences = logged(trainer, "kl/old")
        assert divergences[0] == 0.0 < min(divergences[1:]) and logged(trainer, "ratio/mean")[0] == 1.0
        runs.append((kept, trained_weights(trainer)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert are_equal(runs[0][1], runs[1][1])


class KeepFirstMeans(TrainerCallback):
    """Replays the first rollout before the first update."""

    def __init__(self, trainer, kept):
        self.trainer, self.kept = trainer, kept

    @torch.no_grad()
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 0 and not self.kept:
            for chunk in self.trainer.loader.buffer.chunks():
                (part,) = self.trainer.loader.buffer.part(chunk).parts
                steps = [replay(self.trainer.policy, part.inputs, part.trajectory, step).mean for step in range(3)]
                self.kept.append(torch.stack(steps, 1))


def test_kl_has_a_gradient_and_vanishes_on_the_reference(tmp_path):
    trainer = finished_run(tmp_path, rewards=lambda images, **columns: [1.0] * len(images), beta=1.0)
    assert logged(trainer, "kl")[0] == 0.0 and logged(trainer, "grad_norm")[0] == 0.0
    assert logged(trainer, "frac_reward_zero_std") == [1.0, 1.0] and logged(trainer, "loss") == [0.0, 0.0]
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trainer.train()
    assert logged(trainer, "kl")[0] > 0 and logged(trainer, "grad_norm")[0] > 0


def test_loss_and_gradient_are_grpos(tmp_path):
    """The gradient is that of the objective, written out for the whole rollout at once."""
    trainer = trainer_for(tmp_path, max_steps=1, max_grad_norm=0)
    assert_gradient(trainer, 0, lambda ratios, advantages: -(ratios * advantages[:, None]).sum() / (8 * 3))
    table = read_table(tmp_path)
    rewards = torch.tensor(table["brightness"]).view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()
    torch.testing.assert_close(torch.tensor(table["advantage"]), advantages, rtol=1e-3, atol=1e-3)
    measured = torch.tensor(table["advantage"])
    assert logged(trainer, "spread/advantage_max")[0] == pytest.approx(measured.max().item())
    assert logged(trainer, "frac_advantage_zero")[0] == (measured == 0).double().mean().item()


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
        {"num_trained_steps": 2, "step_selection": "sample", "num_inference_steps": 4, "max_steps": 1},
        OPTIONAL | {"num_generations": 2, "max_steps": 1},
        {"num_trained_steps": 2, "step_selection": "sample", "step_weight": "noise", "max_steps": 1},
    ],
    ids=["several updates", "permuted steps", "parts of a micro-batch", "weighted steps"],
)
def test_each_pass_has_the_advantages_of_its_own_samples(tmp_path, settings):
    """Samples and steps are told by what the loss gets as old log-probabilities, none of which is there twice."""
    settings = {"num_inference_steps": 3, "scale_rewards": "none", "old_log_prob": "rollout", **settings}
    trainer = trainer_for(tmp_path, **settings)
    passes, updates, loss = [], [], trainer.learner.algorithm.step_loss

    def watched(inputs):
        passes.extend(zip(inputs.old_log_prob.tolist(), inputs.advantages.tolist(), strict=True))
        return loss(inputs)

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            buffer, known = trainer.loader.buffer, []
            for slot in (2 * state.global_step, 2 * state.global_step + 1):  # all updates are of one rollout
                rows = buffer.range_of(slot)
                advantages = buffer.advantages.values[rows, None].expand_as(buffer.old_log_probs[rows])
                if settings.get("step_weight"):
                    advantages = advantages * torch.cat([sample.step_weights for sample in buffer.samples[rows]])
                known += zip(buffer.old_log_probs[rows].flatten().tolist(), advantages.flatten().tolist(), strict=True)
            assert len({old for old, _ in known}) == len(known)
            assert sorted(passes) == sorted(known)
            updates.append(list(passes))
            passes.clear()

    trainer.learner.algorithm.step_loss = watched
    trainer.add_callback(Compare)
    trainer.train()
    assert len(updates) == trainer.args.max_steps
    assert len({advantage for update in updates for _, advantage in update}) > 4


def test_dropout_is_off_wherever_the_network_is_called(tmp_path):
    """Also after somebody has switched it on, as transformers' loop does before the first update."""
    trainer = trainer_for(tmp_path, eval_strategy="steps", eval_steps=1, validation_prompts=["a sign"])
    layers = [module for module in trainer.pipe.transformer.modules() if isinstance(module, torch.nn.Dropout)]
    for layer in layers:
        layer.p = 0.5
        layer.register_forward_pre_hook(lambda module, args: on.append(module.training))
    on = []
    trainer.model.train()
    trainer.train()
    trainer.model.train()
    trainer.evaluate()
    assert layers and on and not any(on)
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]


def test_a_replay_that_differs_stops_the_run(tmp_path):
    trainer = trainer_for(tmp_path)
    block = trainer.pipe.transformer.transformer_blocks[0].ff
    block.register_forward_hook(lambda module, args, output: output + 0.5 * torch.randn_like(output))
    with pytest.raises(RatioError, match="max_ratio_error=1e-04.*dropout"):
        trainer.train()


def test_a_drift_that_rounding_explains_stops_no_run_in_half_precision(tmp_path, caplog):
    """One update per rollout: the ratio is 1 all the same."""
    trainer = trainer_for(tmp_path, bf16=True)
    block = trainer.pipe.transformer.transformer_blocks[0].ff
    block.register_forward_hook(lambda module, args, output: output + 0.01 * torch.randn_like(output))
    trainer.train()
    assert logged(trainer, "ratio/mean") == logged(trainer, "ratio/max") == [1.0, 1.0]
    assert min(logged(trainer, "ratio/max_error")) > 1e-4
    assert sum("rounding in half precision explains" in record.getMessage() for record in caplog.records) == 1


def test_what_rounding_does_not_explain_stops_the_run_in_half_precision(tmp_path):
    trainer = trainer_for(tmp_path, bf16=True)
    real = trainer.policy.replay

    def replayed(*args, **kwargs):
        now = real(*args, **kwargs)
        return dataclasses.replace(now, log_prob=now.log_prob + 1.0)

    trainer.policy.replay = replayed
    with pytest.raises(RatioError, match="than half precision explains"):
        trainer.train()


def test_half_precision_is_seen_in_the_weights_too(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    assert not trainer_for(tmp_path / "a").learner.algorithm.is_half_precision
    assert trainer_for(tmp_path / "b", model=pipe.to(dtype=torch.bfloat16)).learner.algorithm.is_half_precision


def test_what_is_not_finite_stops_before_the_weights_are_touched(tmp_path):
    trainer = trainer_for(tmp_path, save_strategy="steps", save_steps=1, max_steps=3)

    class Poison(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = float("nan")

    trainer.add_callback(Poison)
    with pytest.raises(NonFiniteError, match="gradient norm of update 2.*checkpoint-1"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-1"]


def test_a_failing_reward_names_function_prompt_and_keeps_the_sample(tmp_path):
    def picky(images, **columns):
        return [float("nan")] * len(images)

    trainer = trainer_for(tmp_path, rewards=picky)
    with pytest.raises(RewardError, match="picky.*a "):
        trainer.train()
    assert list((tmp_path / "failures").glob("picky*.png"))


def test_an_image_that_cannot_be_read_stops_the_run_after_a_checkpoint(tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(len(PROMPTS))]
    for path in paths:
        Image.new("RGB", (32, 32), "red").save(path)
    settings = {"columns": {"image": paths}, "shuffle_dataset": False, "trained_steps": [0, 2], "max_steps": 9}
    trainer = trainer_for(tmp_path / "run", "sd15_img2img", **settings)
    Path(paths[-1]).write_bytes(b"no picture")
    with pytest.raises(RowError, match=f"Row {len(PROMPTS) - 1} .*column 'image': cannot identify image file"):
        trainer.train()
    assert trainer.state.global_step > 0
    assert (tmp_path / "run" / f"checkpoint-{trainer.state.global_step}" / "trainer_state.json").is_file()


def test_rewards_get_trls_keywords_and_every_column(tmp_path):
    seen = {"prompts": [], "artist": []}

    def spy(prompts, completions, images, trainer_state, log_metric, artist=None, **others):
        seen.update(step=trainer_state.global_step, others=set(others))
        seen["prompts"] += prompts  # called for each group, beside the rollout
        seen["artist"] += artist
        log_metric("spied", 7.0)
        assert completions is images and all(isinstance(image, Image.Image) for image in images)
        return brightness(images)

    trainer = trainer_for(tmp_path, rewards=spy, max_steps=1)
    trainer.train_dataset = Dataset.from_dict({"prompt": ["x", "y"], "artist": ["Ann", "Bob"]})
    trainer.train()
    assert {(p, a) for p, a in zip(seen["prompts"], seen["artist"], strict=True)} == {("x", "Ann"), ("y", "Bob")}
    assert seen["step"] == 0 and logged(trainer, "spied") == [7.0]


def test_the_order_of_aggregation_reaches_the_advantages(tmp_path):
    """Normalised first, a reward of tiny scale counts as much as a large one; summed first, it does not count."""

    def large(images, **columns):
        return [1000.0 * (position % 2) for position in range(len(images))]

    def small(images, **columns):
        return [0.001 * (position % 4 // 2) for position in range(len(images))]

    advantages = {}
    for order in ("sum_then_normalize", "normalize_then_sum"):
        folder = tmp_path / order
        trainer_for(folder, rewards=[large, small], multi_objective_aggregation=order, max_steps=1).train()
        table = read_table(folder)
        advantages[order] = table["advantage"][:4]
    std = 3**-0.5  # of 0, 0, 1, 1 with Bessel's correction
    assert advantages["sum_then_normalize"] == pytest.approx([-0.5 / std, 0.5 / std] * 2, abs=1e-4)
    assert advantages["normalize_then_sum"] == pytest.approx([-1 / std, 0, 0, 1 / std], abs=1e-4)


def test_evaluation_before_and_during_training(tmp_path):
    def measured(images, **columns):
        return [0.25] * len(images)

    trainer = finished_run(
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        eval_num_inference_steps=6,
        num_generations_eval=2,
        eval_reward_funcs=[measured],
        learning_rate=0.0,
    )
    assert logged(trainer, "eval_rewards/measured/mean") == [0.25] * 3
    rewards = logged(trainer, "eval_reward")
    assert len(rewards) == 3 and len(set(rewards)) == 1  # nothing was learned: same prompts, same seeds, same images
    assert "rewards/measured/mean" not in trainer.state.log_history[1]
    steps = sorted(path.name for path in (tmp_path / "evaluations").glob("step-*") if path.is_dir())
    assert steps == ["step-000000", "step-000001", "step-000002"]
    pictures = [sorted((tmp_path / "evaluations" / step).glob("*.png")) for step in steps]
    assert all(len(each) == 4 for each in pictures)
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(pictures[0], pictures[2], strict=True))
    assert (tmp_path / "report.html").is_file() and (tmp_path / "summary.json").is_file()


def test_a_resumed_run_is_not_evaluated_again_at_its_start(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "save_strategy": "steps"}
    settings |= {"save_steps": 1, "num_inference_steps": 2}
    trainer_for(tmp_path, **settings, max_steps=1).train()
    resumed = finished_run(tmp_path, **settings, resume_from_checkpoint=True)
    evaluated = [entry["step"] for entry in resumed.state.log_history if "eval_reward" in entry]
    assert evaluated == [0, 1, 2] and resumed.args.eval_on_start


def test_the_whole_dataset_is_seen_each_epoch_in_another_order(tmp_path):
    trainer = finished_run(tmp_path, max_steps=4)
    tables = [
        pyarrow.parquet.read_table(path).to_pydict() for path in sorted((tmp_path / "samples").glob("*.parquet"))
    ]
    prompts = [list(dict.fromkeys(table["prompt"])) for table in tables]
    assert (
        sorted(prompts[0] + prompts[1]) == sorted(prompts[2] + prompts[3]) == sorted(trainer.train_dataset["prompt"])
    )
    seeds = [seed for table in tables for seed in table["seed"]]
    assert len(set(seeds)) == len(seeds)  # never the same noise twice


def test_a_network_that_the_pipeline_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no network 'unet'"):
        trainer_for(tmp_path, train_component="unet")


def test_training_again_starts_with_a_new_rollout(tmp_path):
    trainer = finished_run(tmp_path, max_steps=1)
    first = trainer.loader.buffer
    trainer.train()
    assert trainer.loader.buffer is not first and logged(trainer, "ratio/max_error") == [0.0]


def test_a_wandering_window_moves_with_the_rollouts(tmp_path):
    steps = []
    settings = {"num_inference_steps": 6, "num_trained_steps": 2, "noisy_steps": "trained", "max_steps": 4}
    trainer = trainer_for(tmp_path, **settings)

    class Note(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            steps.append(torch.cat([sample.steps for sample in trainer.loader.buffer.samples]).unique().tolist())

    trainer.add_callback(Note)
    trainer.train()
    assert steps == [list(SamplingPlan(trainer.args).draw_steps(generation)) for generation in range(4)]
    assert max(logged(trainer, "ratio/max_error")) == 0.0


def test_a_divergence_in_the_reward(tmp_path):
    """At first the policy is the reference; then what is logged is the divergence that replays measure."""
    trainer = trainer_for(tmp_path, kl_reward=0.5, learning_rate=0.01, scale_rewards="none")
    divergences, ratios = [], []
    measure = trainer.passes.rollout_divergences

    def noted(rows, samples):
        divergences.append(measure(rows, samples))
        ratios.append([])
        for column, step in enumerate((0, 1, 2)):  # the same by hand, in the rollout's batches
            for batch in (slice(0, 4), slice(4, 8)):
                inputs, part = trainer.inputs(rows[batch]), Trajectory.cat(samples[batch])
                with torch.no_grad():
                    now = replay(trainer.policy, inputs, part, step)
                    with trainer.model.disable_adapter():
                        reference = replay(trainer.policy, inputs, part, step)
                by_hand = ((now.mean - reference.mean) ** 2 / (2 * now.std**2)).mean((1, 2, 3))
                torch.testing.assert_close(divergences[-1][batch, column], by_hand, rtol=1e-5, atol=0)
                sizes = [step.prediction.double().flatten(1).norm(dim=1) for step in (now, reference)]
                ratios[-1].append((sizes[0] / sizes[1]).mean().item())
        return divergences[-1]

    trainer.passes.rollout_divergences = noted
    trainer.train()
    assert divergences[0].eq(0).all() and divergences[1].gt(0).all()
    assert logged(trainer, "kl/rollout") == pytest.approx([0.0, divergences[1].mean().item()])
    found = logged(trainer, "velocity/ratio_to_ref")
    assert found == pytest.approx([sum(values) / 6 for values in ratios], rel=1e-6)
    assert found[0] == 1.0 and abs(found[1] - 1) > 1e-4
    assert max(logged(trainer, "ratio/max_error")) == 0.0 and "kl" not in trainer.state.log_history[0]
    table = read_table(tmp_path, 1)
    penalised = torch.tensor(table["brightness"]) - 0.5 * divergences[1].mean(1)
    expected = (penalised.view(2, 4) - penalised.view(2, 4).mean(1, keepdim=True)).flatten()
    assert table["advantage"] == pytest.approx(expected.tolist(), abs=1e-6)
    assert table["kl"] == pytest.approx(divergences[1].mean(1).tolist())


def test_clipped_losses_of_each_reward(tmp_path):
    """The second update's gradient is that of DanceGRPO's objective for several rewards."""

    def blueness(images, **columns):
        return [float(np.asarray(image)[..., 2].mean() - np.asarray(image)[..., 0].mean()) for image in images]

    settings = {"multi_objective_aggregation": "loss_per_reward", "num_iterations": 2, "max_steps": 2}
    trainer = trainer_for(
        tmp_path,
        rewards={brightness: 1.0, blueness: 0.5},
        **settings,
        learning_rate=0.02,
        max_grad_norm=0,
        epsilon=1e-2,
    )
    clipped = []

    def objective(ratios, advantages):
        bounded = ratios.clamp(1 - 1e-2, 1 + 1e-2)
        clipped.append((bounded != ratios).float().mean())
        each = [torch.maximum(-a[:, None] * ratios, -a[:, None] * bounded).sum() for a in advantages.T]
        return (each[0] + 0.5 * each[1]) / 24

    assert_gradient(trainer, 1, objective)
    advantages = trainer.loader.buffer.advantages.values
    assert advantages.shape == (8, 2) and advantages.ne(0).all()
    assert 0 < torch.stack(clipped).mean() < 1
    assert logged(trainer, "ratio/max_error") == [0.0]


def test_several_batches_per_step_reach_the_advantages(tmp_path):
    settings = {"scale_rewards": "batch", "max_steps": 1, "gradient_accumulation_steps": 4, "advantage_clip": None}
    stds = []
    for batches in (1, 2):
        folder = tmp_path / str(batches)
        trainer_for(folder, num_batches_per_step=batches, **settings).train()
        table = read_table(folder)
        rewards = torch.tensor(table["brightness"], dtype=torch.float64).view(batches, -1, 4)
        expected = (rewards - rewards.mean(2, keepdim=True)) / rewards.flatten(1).std(1)[:, None, None]
        assert table["advantage"] == pytest.approx(expected.flatten().tolist(), rel=1e-4)
        stds.append(rewards.flatten(1).std(1))
    assert stds[1][0] != pytest.approx(stds[0][0].item(), rel=0.01)


def test_a_network_that_runs_outside_the_steps_is_refused(tmp_path):
    component = "text_encoder, transformer"
    with pytest.raises(UntrainedStepError, match="text_encoder .*runs in no step of .*; train transformer alone"):
        trainer_for(tmp_path, lora=False, train_component=component, num_inference_steps=3).train()


def test_an_update_begins_once(tmp_path):
    """Where a backend clears what the last update left."""
    trainer, calls = trainer_for(tmp_path, num_inference_steps=3), []

    def note(name, method, *args):
        calls.append(name)
        return method(*args)

    for name in ("begin_update", "backward"):
        setattr(trainer.backend, name, partial(note, name, getattr(trainer.backend, name)))
    trainer.train()
    assert calls == ["begin_update", *["backward"] * 4] * 2


def test_a_step_that_no_trained_network_takes_is_refused(tmp_path):
    """The first steps of two experts are those of the first. Nothing is sampled before the window is refused."""
    scored = []

    def counted(prompts, videos, **columns):
        scored.extend(prompts)
        return first_frame_brightness(videos)

    experts = {"name": "wan_experts", "rewards": counted, "num_inference_steps": 6}
    experts |= {"train_component": "transformer_2", "max_steps": 1}
    with pytest.raises(UntrainedStepError, match="Step 1 .*2 to 5"):
        trainer_for(tmp_path / "both", trained_steps=[1, 5], num_trained_steps=1, **experts).train()
    assert not scored
    trainer_for(tmp_path / "last", trained_steps=[3, 5], **experts).train()


@pytest.mark.parametrize(
    ("window", "words"),
    [([0, 2], "transformer_2 will not be trained: it runs in steps 2 to 5, and only steps 0 to 1"), ([1, 3], None)],
)
def test_an_expert_that_no_trained_step_passes_is_named(tmp_path, caplog, window, words):
    settings = {"name": "wan_experts", "rewards": first_frame_brightness, "num_inference_steps": 6, "max_steps": 1}
    trainer = trainer_for(tmp_path, trained_steps=window, **settings)
    moved = train_and_compare(trainer)
    idle = [line for line in caplog.messages if "will not be trained" in line]
    kept = {name.split(".")[0] for name in trained_weights(trainer).keys() - moved if "lora_B" in name}
    if words is None:
        assert idle == [] and not kept
    else:
        (line,) = idle
        assert line.startswith(words) and "train_component='transformer'" in line and kept == {"transformer_2"}
