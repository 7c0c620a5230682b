"""The command line as a whole: help, version, and refusals before anything heavy is imported."""

import subprocess
import sys

import pytest

from diffusion_grpo import __version__, cli


def test_help_does_not_wait_for_torch():
    code = "import sys; from diffusion_grpo.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


TYPING_ERRORS = [  # what is changed in a good file, and the words
    ({"learning_rat": 1e-3}, "train FILE"),
    ({"accelerate_config": "zero33"}, "train FILE"),
    ({"num_processes": "two"}, "train FILE"),
    ({}, "train"),
    ({}, "train missing.yaml"),
    ({}, "train FILE --bta 0.1"),
    ({"learning_rat": 1e-3}, "plan FILE"),
    ({}, "plan FILE --accelerate_config zero33"),
]


def test_mistyped_keys_are_refused_before_anything_heavy_is_imported(config_file, tmp_path):
    cases = []
    for number, (changes, words) in enumerate(TYPING_ERRORS):
        path = tmp_path / f"{number}.yaml"
        path.write_text(open(config_file(**changes)).read())
        cases.append(words.replace("FILE", str(path)).split())
    code = (
        "import sys; from diffusion_grpo import cli; print([cli.main(words) for words in CASES]); "
        "print([name for name in ('torch', 'transformers', 'diffusers', 'datasets', 'numpy') if name in sys.modules])"
    ).replace("CASES", repr(cases))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [str([2] * len(cases)), "[]"]
    lines = result.stderr.splitlines()
    assert len(lines) == len(cases) and all(line.startswith("error: ") for line in lines)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0 and capsys.readouterr().out == f"diffusion-grpo {__version__}\n"


@pytest.mark.parametrize("command", ["", "train", "plan", "check", "sample", "report", "rewards", "rewards serve"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    assert "usage: diffusion-grpo" in capsys.readouterr().out


def test_a_reader_that_stops_early_causes_no_traceback():
    command = [sys.executable, "-m", "diffusion_grpo.cli", "train", "--list-settings"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_ctrl_c_before_or_after_training_says_so(capsys, monkeypatch) -> None:
    def interrupted(arguments) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.report, "run", interrupted)
    assert cli.main(["report", "run"]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_only_the_command_is_read_as_one_and_the_file_may_be_named_as_for_trl_scripts():
    words = ["report", "train", "--experiment", "nothing.json"]
    assert cli.split_overrides(words) == (words, [])
    words = ["--traceback", "train", "train", "--beta", "0.1"]
    assert cli.split_overrides(words) == (words[:3], words[3:])
    for words in (["--config", "a.yaml"], ["--config=a.yaml"]):
        expected = (["train", "a.yaml"], ["--beta", "0.1"])
        assert cli.split_overrides(["train", *words, "--beta", "0.1"]) == expected
        assert cli.split_overrides(["train", "--beta", "0.1", *words]) == expected
    assert cli.split_overrides(["plan", "--config", "a.yaml", "--json"]) == (["plan", "a.yaml", "--json"], [])
