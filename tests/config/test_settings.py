"""Settings of a run: unknown ones, launchers, and what is imported to check them."""

import dataclasses

import pytest
import torch
from command_line import make_config
from transformers import HfArgumentParser, TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.settings import (
    count_launched_processes,
    find_backends_with_cpu,
    has_apple_gpu,
)
from diffusion_grpo.report.record import list_changed_settings
from diffusion_grpo.tiny import default_settings
from diffusion_grpo.training.model import load_plain_pipeline


def test_processes_of_a_launcher_are_counted(monkeypatch):
    assert count_launched_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert count_launched_processes() == 1  # some schedulers of jobs set it everywhere
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert count_launched_processes() == 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(None, None), ("cuda", "cuda:nccl,cpu:gloo"), ("xpu", "xpu:xccl,cpu:gloo"), ("mps", None)],
)
def test_collectives_on_the_cpu_have_a_backend(monkeypatch, kind, expected):
    accelerator = kind and torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    assert find_backends_with_cpu() == expected


@pytest.fixture
def seen_before_processes_meet(monkeypatch, tmp_path):
    """The settings as they are when transformers takes over, which asks for the devices."""
    seen = []

    def meet(self):
        seen.append(self)
        raise InterruptedError

    def make(**given):
        with pytest.raises(InterruptedError):
            DiffusionGRPOConfig(str(tmp_path), **given)
        return seen[-1]

    monkeypatch.setattr(TrainingArguments, "__post_init__", meet)
    return make


def test_the_backend_for_the_cpu_is_set_before_the_processes_meet(monkeypatch, tmp_path, seen_before_processes_meet):
    monkeypatch.setattr("diffusion_grpo.config.settings.find_backends_with_cpu", lambda: "cuda:nccl,cpu:gloo")
    (tmp_path / "fsdp.json").write_text('{"fsdp_cpu_offload": true}')
    offloaded = {"fsdp": True, "fsdp_config": str(tmp_path / "fsdp.json")}
    cases = [({}, None), ({"fsdp": True}, None), (offloaded | {"fsdp": None}, None)]
    cases += [(offloaded | {"ddp_backend": "gloo"}, "gloo"), (offloaded | {"use_cpu": True}, None)]
    cases += [(given, "cuda:nccl,cpu:gloo") for given in (offloaded, {"fsdp": "full_shard offload"})]
    cases += [
        (offloaded | {"fsdp_config": own}, "cuda:nccl,cpu:gloo")
        for own in ({"cpu_offload": True}, '{"cpu_offload": 1}')
    ]
    for given, expected in cases:
        assert seen_before_processes_meet(**given).ddp_backend == expected, given


@pytest.mark.parametrize(("given", "expected"), [({}, ("bf16", True)), ({"bf16": False}, ("no", False))], ids=str)
def test_the_precision_of_the_launcher_counts_where_the_settings_leave_it_open(monkeypatch, tmp_path, given, expected):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch --mixed_precision bf16` does
    config = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given)
    assert (config.mixed_precision, config.bf16) == expected
    assert list_changed_settings(config).get("bf16", False) == expected[1]  # for the card, and to repeat the run
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    config = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given)  # no message: a CPU has no fp16
    assert not config.fp16


@pytest.mark.parametrize(
    ("given", "is_native", "bf16", "warns"),
    [
        ({}, True, True, False),
        ({}, False, False, True),
        ({"fp16": True}, True, False, False),
        ({"bf16": False}, False, False, False),
        ({"use_cpu": True}, True, False, False),
    ],
)
def test_bf16_is_the_default_where_it_is_not_emulated(
    monkeypatch, caplog, tmp_path, seen_before_processes_meet, given, is_native, bf16, warns
):
    supported = lambda including_emulation=True: including_emulation or is_native  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert seen_before_processes_meet(**given).bf16 is bf16
    assert ("fp16=True trains in half precision" in caplog.text) == warns


def test_a_mac_trains_on_its_cpu(monkeypatch, caplog, tmp_path):
    assert not has_apple_gpu()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert has_apple_gpu()
    args = DiffusionGRPOConfig(str(tmp_path))
    assert args.use_cpu and args.device.type == "cpu" and "Apple's GPU has no float64" in caplog.text
    caplog.clear()
    assert DiffusionGRPOConfig(str(tmp_path), use_cpu=True).device.type == "cpu" and caplog.text == ""
    assert load_plain_pipeline("tiny").device.type == "cpu"


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="no setting 'num_generation'; did you mean `num_generations`"):
        make_config(num_generation=8)


@dataclasses.dataclass
class OwnConfig(DiffusionGRPOConfig):
    """Settings of somebody's script, beside those of the library."""

    style: str = "plain"


GIVEN = {"output_dir": "out", "use_cpu": True, "num_generations": 8}


@pytest.mark.parametrize("kind", [DiffusionGRPOConfig, OwnConfig])
@pytest.mark.parametrize(
    "make",
    [
        lambda kind: kind(**GIVEN),
        lambda kind: dataclasses.replace(kind(**GIVEN), seed=42),
        lambda kind: HfArgumentParser(kind).parse_dict(GIVEN)[0],
    ],
    ids=["keywords", "replaced", "parsed"],
)
def test_what_was_chosen_is_known_however_the_settings_are_made(make, kind):
    """So that the embedded model fills in the rest."""
    given = make(kind).given
    assert "num_generations" in given and not given & {"num_inference_steps", "height", "width"}
    assert not given & default_settings({"num_generations": 4}).keys()
    assert "num_inference_steps" in make_config(num_inference_steps=10).given  # a default that is named is a choice


@pytest.mark.parametrize(
    ("given", "eval_steps", "eval_on_start"),
    [
        ({}, None, False),
        ({"eval_on_start": True}, None, True),
        ({"eval_strategy": "epoch"}, None, True),
        ({"eval_strategy": "epoch", "eval_on_start": False}, None, False),
        ({"eval_strategy": "steps", "save_steps": 20}, 20, True),  # with the checkpoints, not with each update's log
        ({"eval_strategy": "steps", "logging_steps": 5}, 5, True),  # as transformers has it
        ({"eval_strategy": "steps", "eval_steps": 2}, 2, True),
    ],
)
def test_when_there_are_evaluations(given, eval_steps, eval_on_start):
    args = make_config(**given)
    assert (args.eval_steps, args.eval_on_start) == (eval_steps, eval_on_start)


def test_no_updates_are_no_epochs():
    made = [make_config(max_steps=steps, num_train_epochs=2).num_train_epochs for steps in (-1, 0, 1)]
    assert made == [2, 0, 2]  # transformers would run all epochs


def test_what_trl_and_parsers_write_is_understood():
    given = [make_config(scale_rewards=value).scale_rewards for value in (True, False, "batch")]
    assert given == ["group", "none", "batch"]
    assert make_config(pipeline_kwargs='{"max_sequence_length": 1}').pipeline_kwargs == {"max_sequence_length": 1}


def test_the_home_folder_may_be_written_short_in_every_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    inner = {"cache_dir": "~/c", "more": ["~/d", "e~", 1]}
    config = DiffusionGRPOConfig("~/run", lora_path="~/lora", model_init_kwargs=inner, use_cpu=True)
    assert (config.output_dir, config.lora_path) == (str(tmp_path / "run"), str(tmp_path / "lora"))
    assert config.model_init_kwargs == {"cache_dir": f"{tmp_path}/c", "more": [f"{tmp_path}/d", "e~", 1]}


def test_no_token_is_shown():
    settings = make_config(hub_token="hf_a", model_init_kwargs={"token": "hf_b"})
    assert "hf_" not in repr(settings) + str(settings)
