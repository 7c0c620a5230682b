"""What the tests of the commands and of their settings share: files of settings, words, and refusals."""

import yaml

from diffusion_grpo import DiffusionGRPOConfig, cli

SIZE = {"height": 16, "width": 16, "num_inference_steps": 3}


def write_config(folder, **changes) -> str:
    """Write the YAML file of a run on two prompts, with some keys changed; return its path."""
    (folder / "prompts.txt").write_text("a red fox\na blue house\n")
    settings = {
        "model": "nobody/nothing",
        "dataset": str(folder / "prompts.txt"),
        "reward_funcs": ["brightness"],
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**settings, **changes}))
    return str(path)


def flags(**options) -> list[str]:
    """Write options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def refusal(capsys, *words) -> str:
    """Return the one line with which a command line is refused."""
    assert cli.main(list(words)) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line and not line.startswith("Generating")]  # datasets' bar
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def make_config(**settings) -> DiffusionGRPOConfig:
    """Return the settings of a run on the CPU."""
    return DiffusionGRPOConfig("out", **{"use_cpu": True, **settings})
