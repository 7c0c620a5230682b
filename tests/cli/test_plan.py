"""`diffusion-grpo plan` prints tables or JSON."""

import json

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
    assert "prompts per rollout │ 48" in out
    assert "stable-diffusion-3.5-medium is not here" in out and "--model FOLDER" in out
