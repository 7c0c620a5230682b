"""`make gpu-check`: what it runs on a GPU runs here with tiny networks, and a bad end of one case is no other's."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
import ranks_server
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu_cases, gpu_check, gpu_requirements, gpu_sizes
from benchmarks.gpu_check import ROOT, Case, Check, Result
from benchmarks.step import BareLoop

GOOD = "import json, sys; json.dump({'found': 0.5}, open(sys.argv[1], 'w'))"
CODE = {
    "a/good": GOOD,
    "a/none": "import json, sys; json.dump({'not run': 'needs a GPU'}, open(sys.argv[1], 'w'))",
    "a/bad": "print('before'); raise ValueError('what went wrong')",
    "a/slow": "import time; time.sleep(60)",
    "c/alone": GOOD,
}


def run_check(out, cases, seconds=60.0):
    command = lambda name, values: [sys.executable, "-S", "-c", CODE[name], str(values)]  # noqa: E731
    return Check(out, command, seconds, "one GPU").run(cases, jobs=2)


def test_cases_that_end_badly_leave_their_last_lines_and_do_not_stop_the_others(tmp_path, capsys):
    cases = [Case("a/bad"), Case("a/good"), Case("a/none"), Case("c/alone", needs="a/good", is_alone=True)]
    bad, good, none, alone = run_check(tmp_path, cases)
    assert (bad.status, good.status, none.status, alone.status) == ("failed", "ok", "not run", "ok")
    assert bad.error.splitlines()[0] == "exit code 1" and "ValueError: what went wrong" in bad.error
    assert good.values == {"found": 0.5} and none.error == "needs a GPU"
    stored = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {Result(**entry).case for entry in stored} == {case.name for case in cases}
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("one GPU\n") and "| good | 0.50 |" in table and "failed: a/bad: exit code 1 /" in table
    assert len(capsys.readouterr().out.split("a/bad ")) == 2


def test_a_case_that_takes_too_long_is_stopped_and_what_needs_it_is_not_begun(tmp_path):
    began = time.monotonic()
    slow, after = run_check(tmp_path, [Case("a/slow", limit=0.3), Case("a/good", needs="a/slow")])
    assert time.monotonic() - began < 30
    assert slow.status == "failed" and slow.error.startswith("stopped at its time limit")
    assert after.status == "not run" and "a/slow" in after.error


def test_what_no_longer_fits_is_not_begun(tmp_path):
    late, fits = run_check(tmp_path, [Case("a/slow", expected=20), Case("a/good", expected=0)], seconds=10.0)
    assert (late.status, late.error) == ("not run", "no time left") and fits.status == "ok"


def test_cases_bring_those_that_they_need():
    cases = gpu_check.list_cases()
    chosen = gpu_check.select_cases(cases, "", ["c/sdxl", "b/ZeRO-3 full"])
    assert [case.name for case in chosen] == [
        "a/model",
        "b/one process full",
        "b/ZeRO-3 full",
        "c/plan sdxl",
        "c/sdxl",
    ]
    assert {case.section for case in gpu_check.select_cases(cases, "a", [])} == {"a"}
    places = {case.name: place for place, case in enumerate(cases)}
    assert all(case.needs is None or places[case.needs] < places[case.name] for case in cases)  # or two would wait
    with pytest.raises(ValueError, match="no 'e'"):
        gpu_check.select_cases(cases, "e", [])
    assert {name for name, _ in gpu_check.SIZES} == set(gpu_sizes.TRAININGS)


def test_a_failed_case_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: "a GPU")
    for status, code in (("ok", 0), ("not run", 0), ("failed", 1)):
        monkeypatch.setattr(Check, "run", lambda self, cases, jobs, status=status: [Result(cases[0].name, status)])
        assert gpu_check.main(["--cases", "a/model", "--out", str(tmp_path)]) == code
    assert gpu_check.main(["--sections", "x"]) == 2 and "no 'x'" in capsys.readouterr().err
    assert gpu_check.main(["--list"]) == 0 and "c/flux-nf4" in capsys.readouterr().out


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    assert gpu_cases.run("a/model", folder, True)["weights"] == "2.9 M"
    return folder


@pytest.mark.parametrize("name", ["float32", "bf16-rollout-1", "bf16-sdpa-math", "bf16-group-offload"])
def test_variants_run_small_on_a_cpu(name, work):
    found = gpu_cases.run(f"a/{name}", work, True)
    assert 0 <= found["max error"] <= (0.0 if name == "float32" else 0.1)
    assert found["gradient"] > 0


def test_the_attention_of_a_case_is_that_of_the_trained_network_alone(monkeypatch):
    """T5, whose attention has a mask, finds its own kernel."""
    allowed = lambda *args: (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())  # noqa: E731
    monkeypatch.setattr(JointAttnProcessor2_0, "__call__", allowed)
    network, both = JointAttnProcessor2_0(), (True, True)
    with gpu_cases.use_attention("MATH"):
        assert network() == (True, False) and allowed() == both
    with gpu_cases.use_attention("FLASH_ATTENTION"):
        assert network() == (False, True) and allowed() == both
    assert network() == both


def test_each_case_of_the_first_section_is_a_precision_and_a_variant(tmp_path):
    with pytest.raises(gpu_cases.NotRunError, match="needs a GPU"):
        gpu_cases.run("a/nf4", tmp_path, True)
    assert all(sum(gpu_cases.split_name(name)[0][key] for key in ("bf16", "fp16")) < 2 for name in gpu_check.RATIO)
    settings, attention = gpu_cases.split_name("bf16-sdpa-flash")
    assert settings == {"bf16": True, "fp16": False} and attention == "FLASH_ATTENTION"
    assert gpu_cases.split_name("nf4-compile")[0].keys() == {"bf16", "fp16", "load_in_4bit", "torch_compile"}


def write_case(name, folder, values):
    values.write_text(json.dumps(gpu_cases.run(name, folder, True)))


def run_modes(work, folder, modes, trains):
    """Each mode in a process of its own, the plain one first."""
    found = {}
    for mode in ["one process", *modes]:
        values = folder / f"{mode}.json"
        ranks_server.succeed(folder / mode, 1, write_case, f"b/{mode} {trains}", work, values)
        found[mode] = json.loads(values.read_text())
    return found


def test_fsdp2_in_a_group_of_one_makes_the_update_of_a_plain_process(work, tmp_path):
    found = run_modes(work, tmp_path, ["FSDP2"], "lora")["FSDP2"]
    assert (found["engine"], found["group"], found["max error"]) == ("FSDPPeftModel", "gloo, 1", 0)
    assert found["largest difference"] < 1e-4


@pytest.mark.distributed
@pytest.mark.parametrize("trains", ["lora", "full"])
def test_other_modes_in_a_group_of_one_make_it_too(trains, work, tmp_path):
    found = run_modes(work, tmp_path, ["DDP", "ZeRO-2", "ZeRO-3"], trains)
    engines = ["DistributedDataParallel", "DeepSpeedEngine", "DeepSpeedEngine"]
    for mode, engine in zip(["DDP", "ZeRO-2", "ZeRO-3"], engines, strict=True):
        assert found[mode]["engine"] == engine and found[mode]["largest difference"] < 1e-4


@pytest.mark.parametrize("name", ["sd35m-lora", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_each_size_runs_small_and_is_planned(name, tmp_path):
    planned = gpu_cases.run(f"c/plan {name}", tmp_path, True)
    found = gpu_cases.run(f"c/{name}", tmp_path, True)
    assert found["plan GiB"] == planned["plan GiB"] > 0
    assert all(found[key] > 0 for key in ("rollout s", "update s", "bare s", "overhead", "rollout GiB", "update GiB"))


def test_real_sizes_are_not_begun_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_sizes.torch.cuda, "is_available", lambda: False)
    with pytest.raises(gpu_cases.NotRunError, match="needs a GPU"):
        gpu_sizes.check_room(1)
    monkeypatch.setattr(gpu_sizes.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_sizes.torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    gpu_sizes.check_room(2**30)
    with pytest.raises(gpu_cases.NotRunError, match=r"planned are 2.0 GiB, and 1.0 of 2.0 are free"):
        gpu_sizes.check_room(2**31)


class Noted(torch.nn.Linear):
    """A network that notes in which precision it computed."""

    device = torch.device("cpu")

    def forward(self, x):
        output = super().forward(x)
        self.seen.append(output.dtype)
        return (output,)


def test_bare_calls_have_the_autocast_of_the_trainers_calls_and_leave_no_trace():
    network, vae = Noted(4, 4), SimpleNamespace(decode=None)
    network.seen, network.forward = [], network.forward  # as accelerate puts one of its own there
    own = network.forward
    bare = BareLoop(SimpleNamespace(transformer=network, vae=vae, components={"transformer": network}))
    bare.on_step_begin(None, SimpleNamespace(global_step=1), None)
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.ones(1, 4))
    network(torch.ones(1, 4))
    bare.on_step_end(None, SimpleNamespace(global_step=2), None, model=network)
    assert network.seen == [torch.bfloat16, torch.float32] * 2
    assert network.__dict__["forward"] == own and vars(vae) == {"decode": None}


def test_the_demo_runs_short(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = gpu_cases.run("d/demo", tmp_path, True)
    assert found["updates"] == 1 and " to " in found["reward"] and found["max error"] <= 1e-6


# What is carried to a machine without a registry


def test_requirements_are_those_that_are_tested():
    lines = (ROOT / "benchmarks" / "gpu_requirements.txt").read_text().splitlines()
    read = lambda lines: {  # noqa: E731
        canonicalize_name(Requirement(line).name): str(Requirement(line).specifier)
        for line in lines
        if line and not line.startswith("#")
    }
    carried, tested = read(lines), read((ROOT / "constraints.txt").read_text().splitlines())
    untested = carried.keys() - tested.keys()
    assert untested <= {"bitsandbytes", "torchao"}  # which only tests of quantisation and GPUs need
    assert {name: carried[name] for name in carried.keys() - untested} == {
        name: tested[name] for name in carried.keys() - untested
    }


def test_what_is_not_used_is_left_out(tmp_path):
    kept = ["bitsandbytes/libbitsandbytes_cuda130.so", "bitsandbytes/libbitsandbytes_cpu.so"]
    kept += ["rapidocr/models/PP_rec_small.onnx", "diffusers/pipelines/test.py"]
    dropped = ["bitsandbytes/libbitsandbytes_cuda128.so", "torchao/_C.so", "rapidocr/models/PP_det_small.onnx"]
    for name in [*kept, *dropped, "test/test_it.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    gpu_requirements.trim(tmp_path, "130")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    with pytest.raises(ValueError, match="no library for CUDA 129; there are 130"):
        gpu_requirements.trim(tmp_path, "129")
    gpu_requirements.pack(tmp_path, tmp_path.parent / "packages.tar.xz")
    assert (tmp_path.parent / "packages.tar.xz").stat().st_size > 0
