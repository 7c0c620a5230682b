"""Settings of a run: unknown ones, launchers, and what is imported to check them."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from command_line import make_config
from transformers import HfArgumentParser, TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.settings import (
    computes_in_bf16,
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


def test_collectives_on_the_cpu_have_a_backend(monkeypatch):
    assert find_backends_with_cpu() is None  # gloo alone
    for kind, expected in [("cuda", "cuda:nccl,cpu:gloo"), ("xpu", "xpu:xccl,cpu:gloo"), ("mps", None)]:
        found = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False, f=found: f)
        assert find_backends_with_cpu() == expected


def test_the_backend_for_the_cpu_is_set_before_the_processes_meet(monkeypatch, tmp_path):
    monkeypatch.setattr("diffusion_grpo.config.settings.find_backends_with_cpu", lambda: "cuda:nccl,cpu:gloo")
    seen = []

    def meet(self):
        seen.append(self.ddp_backend)
        raise InterruptedError

    monkeypatch.setattr(TrainingArguments, "__post_init__", meet)
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
        with pytest.raises(InterruptedError):
            DiffusionGRPOConfig(str(tmp_path), **given)
        assert seen.pop() == expected, given


@pytest.mark.parametrize(
    ("is_there", "is_its_own", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_emulated_bf16_is_no_default(monkeypatch, is_there, is_its_own, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    supported = lambda including_emulation=True: including_emulation or is_its_own  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert computes_in_bf16() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ("bf16", True)), ({"bf16": True}, ("bf16", True)), ({"bf16": False}, ("no", False))],
    ids=str,
)
def test_the_precision_of_the_launcher_counts_where_the_settings_leave_it_open(monkeypatch, tmp_path, given, expected):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch --mixed_precision bf16` does
    config = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given)
    assert (config.mixed_precision, config.bf16) == expected
    assert list_changed_settings(config).get("bf16", False) == expected[1]  # for the card, and to repeat the run
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    config = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given)  # no message: a CPU has no fp16
    assert not config.fp16


@pytest.mark.parametrize(
    ("given", "warns"), [({}, True), ({"fp16": True}, False), ({"bf16": False}, False), ({"use_cpu": True}, False)]
)
def test_a_gpu_without_bf16_trains_in_float32_and_says_so(monkeypatch, caplog, tmp_path, given, warns):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    seen = []

    def meet(self):
        seen.append(self.bf16)
        raise InterruptedError

    monkeypatch.setattr(TrainingArguments, "__post_init__", meet)
    with pytest.raises(InterruptedError):
        DiffusionGRPOConfig(str(tmp_path), **given)
    assert seen == [False]
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


def test_config_errors_in_python_do_not_wait_for_diffusers():
    code = (
        "import sys\nfrom diffusion_grpo import DiffusionGRPOConfig\n"
        "try:\n    DiffusionGRPOConfig('out', num_generations=1)\nexcept ValueError as error:\n    print(error)\n"
        "print('diffusers' in sys.modules, 'datasets' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "num_generations must be at least 2" in result.stdout and result.stdout.endswith("False False\n")


@dataclasses.dataclass
class OwnConfig(DiffusionGRPOConfig):
    """Settings of somebody's script, beside those of the library."""

    style: str = "plain"


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_config(num_generations=8),
        lambda: dataclasses.replace(make_config(num_generations=8), seed=42),
        lambda: OwnConfig("out", use_cpu=True, num_generations=8, style="bold"),
        lambda: dataclasses.replace(OwnConfig("out", use_cpu=True, num_generations=8), style="bold"),
        lambda: HfArgumentParser(DiffusionGRPOConfig).parse_args_into_dataclasses(
            ["--output_dir", "out", "--use_cpu", "--num_generations", "8"]
        )[0],
        lambda: HfArgumentParser(OwnConfig).parse_dict({"output_dir": "out", "use_cpu": True, "num_generations": 8})[
            0
        ],
    ],
    ids=["keywords", "replaced", "own", "own replaced", "parsed", "own parsed"],
)
def test_what_was_chosen_is_known_however_the_settings_are_made(make):
    """So that the embedded model fills in the rest."""
    given = make().given
    assert "num_generations" in given and not given & {"num_inference_steps", "height", "width"}
    assert not given & default_settings({"num_generations": 4}).keys()


def test_a_default_that_is_given_by_name_is_a_choice():
    assert "num_inference_steps" in make_config(num_inference_steps=10).given


def test_evaluations_come_with_the_checkpoints_by_default():
    """And not with each log entry, which is each update."""
    assert make_config(eval_strategy="steps", save_steps=20).eval_steps == 20
    assert make_config(eval_strategy="steps", logging_steps=5).eval_steps == 5  # as transformers has it
    assert make_config(eval_strategy="steps", eval_steps=2).eval_steps == 2
    assert make_config(eval_strategy="epoch").eval_steps is None


def test_where_evaluations_are_on_there_is_one_before_training():
    assert make_config(eval_strategy="epoch").eval_on_start is True
    assert make_config(eval_strategy="epoch", eval_on_start=False).eval_on_start is False
    assert make_config().eval_on_start is False and make_config(eval_on_start=True).eval_on_start is True


def test_scale_rewards_takes_the_values_of_trl():
    assert [make_config(scale_rewards=value).scale_rewards for value in (True, False, "batch")] == [
        "group",
        "none",
        "batch",
    ]


def test_the_home_folder_may_be_written_short_in_every_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = DiffusionGRPOConfig("~/run", lora_path="~/lora", model_init_kwargs={"cache_dir": "~/c"}, use_cpu=True)
    assert (config.output_dir, config.lora_path) == (str(tmp_path / "run"), str(tmp_path / "lora"))
    assert config.model_init_kwargs == {"cache_dir": str(tmp_path / "c")}


def test_no_token_is_shown():
    settings = make_config(hub_token="hf_a", model_init_kwargs={"token": "hf_b"})
    assert "hf_" not in repr(settings) + str(settings)
