"""Two processes do what one does: the same samples and rewards, and the same weights within float32's rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_pipelines
from safetensors.torch import load_file

TESTS = Path(__file__).parent
SETTINGS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "num_generations": 4, "max_steps": 3}


def launch(processes, *words):
    """Runs a script or module on so many processes; one alone is started as users do, without a launcher."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, *map(str, words)], cwd=TESTS.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def result(folder, processes, **settings):
    """What a run said of itself, and its trained weights."""
    launch(processes, TESTS / "distributed_run.py", folder, json.dumps(SETTINGS | settings))
    return json.loads((folder / "result.json").read_text()), load_file(folder / "weights.safetensors")


def test_two_processes_train_what_one_trains(tmp_path):
    alone, weights = result(tmp_path / "one", 1)
    both, together = result(tmp_path / "two", 2)
    assert (alone["wrapper"], both["wrapper"]) == ("PeftModel", "DistributedDataParallel")
    assert alone["ratio"] == both["ratio"] == 0.0
    assert alone["rewards"] == both["rewards"]
    assert max((weights[name] - together[name]).abs().max() for name in weights) < 1e-6


@pytest.mark.slow
def test_the_wan_example_runs_on_two_processes(tmp_path):
    pipe, _ = tiny_pipelines.build("wan")
    pipe.save_pretrained(tmp_path / "model")
    small = "--height 16 --width 16 --num_frames 5 --num_generations 2 --gradient_accumulation_steps 1 "
    small += (
        "--steps_per_generation 2 --num_inference_steps 4 --eval_num_inference_steps 4 --max_steps 2 --eval_steps 1 "
    )
    small += "--save_steps 1 --eval_max_prompts 2 --lora_r 4 --bf16 false --use_cpu true --reward_funcs brightness"
    run = [
        "--model",
        tmp_path / "model",
        "--output_dir",
        tmp_path / "run",
        "--pipeline_kwargs",
        '{"max_sequence_length": 32}',
    ]
    out = launch(2, "-m", "diffusion_grpo.cli", "train", "examples/wan21_ocr.yaml", *small.split(), *run)
    assert "Held-out reward" in out
    assert (tmp_path / "run" / "checkpoint-1" / "rollout-rank1.safetensors").is_file()  # each keeps its own part
    assert (tmp_path / "run" / "pytorch_lora_weights.safetensors").is_file()
