"""Tables of a rollout's samples, and which samples are kept as files."""

from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from command_line import make_config
from PIL import Image

from diffusion_grpo.report.samples import SampleWriter


def make_writer(folder, groups=None, **settings):
    inputs = SimpleNamespace(fps=8.0, find_images=lambda row: row.get("images", []))
    groups = SimpleNamespace(**{"index": 1, "count": 2, "is_first": True} | (groups or {}))
    args = make_config(**settings)
    args.output_dir = str(folder)
    return SampleWriter(args, inputs, ["text"], groups, None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"log_samples_steps": None}, {}),
        ({"log_samples_steps": 4}, {0: 3, 4: 3, 8: 3, 9: 3}),
        ({"log_samples_steps": 100}, {0: 3, 9: 3}),
        ({"save_samples_steps": 3, "log_samples_steps": 1}, {0: 16, 3: 16, 6: 16, 9: 16}),
        ({"log_samples_steps": 3, "num_iterations": 2}, {0: 3, 4: 3, 6: 3, 8: 3}),
        ({"save_samples_steps": 3, "num_iterations": 2}, {0: 16, 4: 16, 6: 16}),
    ],
)
def test_which_samples_are_kept(tmp_path, settings, expected):
    writer = make_writer(tmp_path, num_completions_to_log=3, **settings)
    steps = range(0, 10, settings.get("num_iterations", 1))
    per_rollout = writer.args.batch_sizes.samples_per_rollout
    counts = {step: writer.count_kept(step, last_step=10) for step in steps}
    expected = {step: per_rollout if count == 16 else count for step, count in expected.items()}
    assert {step: count for step, count in counts.items() if count} == expected


def write(folder, number, rest=None, groups=None, **settings):
    own = {"num_completions_to_log": number, "log_samples_steps": 1} | settings
    samples, rows = [Image.new("RGB", (4, 4))] * 2, [{"prompt": "a"}, rest or {}]
    columns = {"seed": [7, 8], "row": [3, 4]}
    scores = torch.tensor([[0.5], [0.25]])
    make_writer(folder, groups, **own).write(5, 9, rows, samples, torch.tensor([1, 0]), scores, columns)


def test_a_table_has_prompts_rewards_columns_and_files(tmp_path):
    write(tmp_path, 1)
    table = pyarrow.parquet.read_table(tmp_path / "samples" / "step-000005-rank1.parquet").to_pydict()
    assert table == {
        "seed": [7, 8],
        "row": [3, 4],
        "image": [None, "samples/step-000005/0000.png"],  # the first of the rollout, wherever it is here
        "file": [None, "samples/step-000005/0000.png"],
        "step": [5, 5],
        "prompt": ["a", ""],
        "text": [0.5, 0.25],
    }
    assert [path.name for path in tmp_path.glob("samples/*/*")] == ["0000.png"]


def test_the_image_that_a_kept_sample_was_made_from_is_beside_it(tmp_path):
    images = [Image.new("RGB", (2048, 1024), "red"), Image.new("L", (16, 32), 255)]
    write(tmp_path, 1, rest={"images": images})
    assert images[0].size == (2048, 1024)  # as the replay needs it
    table = pyarrow.parquet.read_table(tmp_path / "samples" / "step-000005-rank1.parquet").to_pydict()
    assert table["input"] == [None, "samples/step-000005/0000-input.png"]  # the first sample of the rollout
    with Image.open(tmp_path / table["input"][1]) as image:
        assert image.size == (512 + 4 + 128, 256)  # the second has the height of the first
        assert image.getpixel((0, 0)) == (255, 0, 0) and image.getpixel((600, 100)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("number", "options", "expected"),
    [
        (0, {}, ["step-000005-rank1.parquet"]),
        (2, {"groups": {"index": 0, "count": 1}}, ["step-000005", "step-000005.parquet"]),
        (2, {"log_completions": False}, []),
        (2, {"groups": {"is_first": False}}, []),
    ],
)
def test_what_is_written(tmp_path, number, options, expected):
    write(tmp_path, number, **options)
    assert sorted(path.name for path in tmp_path.glob("samples/*")) == expected
