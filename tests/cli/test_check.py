"""`diffusion-grpo check` prints how exactly a pipeline replays."""

from command_line import SIZE, flags

from diffusion_grpo import cli


def test_check_prints_the_replay_report(model, capsys):
    assert cli.main(["check", model, *flags(**SIZE, pipeline_kwargs='{"max_sequence_length": 8}')]) == 0
    printed = capsys.readouterr().out
    assert "max_ratio_error" in printed and "StableDiffusion3Pipeline" in printed
