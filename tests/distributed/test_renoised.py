"""Losses on re-noised samples on two processes: the samples, rewards and weights of one, in every mode."""

import json

import pytest
import rank_runs
from tiny_runs import are_equal, difference

# groups of four on two processes; an old policy well behind the policy; a second update on each rollout
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_inference_steps": 3,
    "num_iterations": 2,
    "max_steps": 3,
    "beta": 0.05,
    "reward_weights": [0.0, 1.0],
}
NFT = SETTINGS | {"loss_type": "nft", "loss_kwargs": {"decay_rate": 0.3, "decay_max": 0.9}}
FULL = NFT | {"lora": False, "optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "num_iterations": 1}
AWM = NFT | {"loss_type": "awm", "num_trained_steps": 2, "step_selection": "sample", "num_inference_steps": 5}
WHOLE = SETTINGS | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
DGPO = WHOLE | {"loss_type": "dgpo", "loss_kwargs": NFT["loss_kwargs"] | {"preference_beta": 10.0}}
DPO = WHOLE | {"loss_type": "dpo", "loss_kwargs": {"preference_beta": 10.0}, "best_of_n": 2, "num_generations": 8}
EXPERTS = NFT | {"name": "wan_experts", "num_inference_steps": 6, "num_iterations": 1, "max_steps": 2}
BOTH = ("transformer", "transformer_2")
ALL_WEIGHTS = {"lora": False, "optim": "sgd", "learning_rate": 0.1, "max_steps": 2}

WRAPPERS = {"ddp": "DistributedDataParallel"} | dict.fromkeys(("zero1", "zero2", "zero3"), "DeepSpeedEngine")
WRAPPERS["fsdp2"] = "FSDPPeftModel"
FULL_AS_WELL = {"awm": AWM, "dgpo": DGPO, "dpo": DPO}
RUNS = {
    (name, mode): own
    for name, own in {"nft": NFT, **FULL_AS_WELL}.items()
    for mode in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
}
RUNS |= {
    (f"{name}, all weights", mode): own | ALL_WEIGHTS
    for name, own in FULL_AS_WELL.items()
    for mode in ("zero2", "zero3", "fsdp2")
}
RUNS |= {("nft, all weights", "zero2"): FULL}
RUNS |= {("nft, two experts", mode): EXPERTS for mode in ("ddp", "zero3", "fsdp2")}
RUNS |= {("awm, EDM", "ddp"): AWM | {"name": "cosmos"}, ("dgpo, DDIM", "fsdp2"): DGPO | {"name": "sd15"}}


def ran(folder, processes, settings, resume=None):
    is_video = settings.get("name", "").startswith(("wan", "cosmos"))
    return rank_runs.trained(folder, processes, settings, "smooth video" if is_video else "smooth", resume)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "settings"), [(mode, own) for (_, mode), own in RUNS.items()], ids=map(", ".join, RUNS)
)
def test_two_processes_train_what_one_trains(tmp_path, mode, settings):
    _, alone, weights = ran(tmp_path / "one", 1, settings)
    wrapper, both, together = ran(tmp_path / "two", 2, settings | {"mode": mode})
    is_sharded_whole = mode == "fsdp2" and "lora" in settings
    expected = "FSDPSD3Transformer2DModel" if is_sharded_whole else WRAPPERS[mode]
    assert wrapper == expected or (mode == "fsdp2" and settings is EXPERTS)  # each of which is wrapped by itself
    assert len(alone) == len(both) == settings["max_steps"]
    assert alone[0]["reward"] == both[0]["reward"]
    for one, other in zip(alone, both, strict=True):
        for name in ("reward", "denoising_error", "kl", "velocity/ratio_to_ref", "old/distance"):
            assert other.get(name, 0.0) == pytest.approx(one.get(name, 0.0), rel=1e-3, abs=1e-6), name
        assert other.get("prediction/max_error", 0.0) == one.get("prediction/max_error", 0.0) == 0.0
    # first updates, while something is recorded for them
    checked = ["prediction/max_error" in entry for entry in both]
    assert checked == [True, False, True][: len(both)]
    assert difference(weights, together) < 1e-6
    first = rank_runs.first_weights(settings | {"reward_weights": None})
    moved = {name: float((weights[name] - first[name]).abs().max()) for name in weights}
    assert max(moved.values()) > 1e-4
    if settings is EXPERTS:
        assert all(max(moved[name] for name in weights if name.startswith(f"{own}.")) > 1e-4 for own in BOTH)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("ddp", NFT),
        pytest.param("zero3", NFT, marks=pytest.mark.distributed),
        pytest.param("fsdp2", NFT, marks=pytest.mark.distributed),
        pytest.param("zero3", AWM, marks=pytest.mark.distributed),
        pytest.param("zero2", DGPO, marks=pytest.mark.distributed),
        pytest.param("fsdp2", DPO, marks=pytest.mark.distributed),
    ],
)
def test_an_old_policy_and_an_average_go_on_where_two_processes_left_them(tmp_path, mode, settings):
    """A run that goes on inside a rollout ends with the weights of one that was not stopped, bit for bit.

    Evaluations compare the average with the reference in between.
    """
    settings = settings | {"mode": mode, "save_strategy": "steps", "save_steps": 1}
    settings |= {"ema_decay": 0.5, "ema_update_interval": 1}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "held_out": ["held out", "and another"]}
    _, log, weights = ran(tmp_path / "whole", 2, settings)
    point = str(tmp_path / "whole" / "run" / "checkpoint-1")
    _, rest, resumed = ran(tmp_path / "resumed", 2, settings, point)
    has_old_policy = settings["loss_type"] != "dpo"
    assert log[-1].get("old/distance") == rest[-1].get("old/distance")
    assert log[-1].get("old/distance", 0) > 0 or not has_old_policy
    every = json.loads((tmp_path / "whole" / "run" / "result.json").read_text())["log"]
    evaluated = [(entry["eval_kl"], entry["eval_velocity/ratio_to_ref"]) for entry in every if "eval_kl" in entry]
    assert len(evaluated) == 3 and all(distance > 0 and 0 < ratio != 1 for distance, ratio in evaluated)
    assert are_equal(weights, resumed)
