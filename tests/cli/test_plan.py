"""`diffusion-grpo plan` prints tables or JSON."""

import json

import pytest
import yaml
from command_line import refusal
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below

from diffusion_grpo import cli


def test_the_command_prints_tables_and_json(tmp_path, capsys):
    config = write_run(tmp_path, "sd3", num_processes=4, accelerate_config="fsdp2")
    assert cli.main(["plan", config, "--num_generations", "8"]) == 0
    out = capsys.readouterr().out
    assert "samples per rollout" in out and "fsdp2" in out and "trajectory" in out
    assert cli.main(["plan", config, "--json", "--accelerate_config", "zero2"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["batches"]["processes"] == 4 and made["sharding"]["name"] == "zero2"
    always = sum(item["accelerator"] for item in made["memory"] if not item["phase"])
    phases = {item["phase"]: item["accelerator"] for item in made["memory"] if item["phase"]}
    assert made["total"]["accelerator"] == always + max(phases.values())
    assert phases[made["total"]["phase"]] == max(phases.values()) > 0


def test_a_model_that_is_not_here_leaves_the_batches(capsys):
    words = ["plan", "examples/sd35_ocr.yaml", "--num_processes", "8"]
    assert cli.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "prompts per rollout │ 48" in out and "updates of the whole run" in out
    assert "stable-diffusion-3.5-medium is not available here" in out and "--model FOLDER" in out


def test_the_command_says_whether_the_run_fits_and_what_would_make_it(tmp_path, capsys):
    config = write_run(tmp_path, "flux", height=96, width=96)
    assert cli.main(["plan", config, "--device-memory", "100KiB"]) == 0
    assert "does not fit into" in capsys.readouterr().out
    found = json_of(capsys, ["plan", config, "--fit", "24GiB", "--json"])
    assert found["fits"] and found["settings"] == {}
    assert cli.main(["plan", config, "--fit", f"{found['before']['accelerator'] // 1024}KiB"]) == 0
    out = capsys.readouterr().out
    assert "with these settings it fits into" in out and yaml.safe_load(out)["per_device_train_batch_size"] == 1
    assert "large" in refusal(capsys, "plan", config, "--fit", "large")
    assert "is a folder; give the path of a YAML file" in refusal(capsys, "plan", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", config, "--fit", "1GiB", "--device-memory", "1GiB"])


def json_of(capsys, words):
    capsys.readouterr()
    assert cli.main(words) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_processes_of_one_machine_share_its_memory(tmp_path, capsys):
    config = write_run(tmp_path, "sd3", num_processes=4, num_machines=2, accelerate_config="multi_gpu")
    made = json_of(capsys, ["plan", config, "--json"])
    assert made["processes_per_machine"] == 2
    assert made["cpu_per_machine"] == 2 * made["total"]["cpu"] > 0
    cli.main(["plan", config])
    assert "The 2 processes of a machine take" in capsys.readouterr().out
