"""Tables of a rollout's samples, and which samples are kept as files."""

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from diffusion_grpo.run.sample_writer import KeptSamples, SampleWriter


def count(updates_per_rollout, **settings):
    """How many of 8 samples are kept of the rollouts of ten updates."""
    given = {"save_steps": None, "log_steps": None, "count": 3} | settings
    kept = KeptSamples(8, updates_per_rollout, **given)
    return {step: found for step in range(0, 10, updates_per_rollout) if (found := kept.number(step, last_step=10))}


@pytest.mark.parametrize(
    ("updates", "settings", "expected"),
    [
        (1, {}, {}),
        (1, {"log_steps": 4}, {0: 3, 4: 3, 8: 3, 9: 3}),
        (1, {"log_steps": 100}, {0: 3, 9: 3}),
        (2, {"log_steps": 3}, {0: 3, 4: 3, 6: 3, 8: 3}),
        (1, {"save_steps": 3, "log_steps": 1}, {0: 8, 3: 8, 6: 8, 9: 8}),
        (2, {"save_steps": 3}, {0: 8, 4: 8, 6: 8}),
    ],
)
def test_which_samples_are_kept(updates, settings, expected):
    assert count(updates, **settings) == expected


def write(folder, number, rest=None, **options):
    kept = KeptSamples(2, 1, save_steps=None, log_steps=None if number == 0 else 1, count=number)
    settings = {"fps": 8.0, "sampling_rate": None, "part": "-rank1", "is_active": True, "writes_tables": True}
    settings |= {"find_images": lambda row: row.get("images", [])}
    writer = SampleWriter(folder, reward_names=["text"], kept=kept, **settings | options)
    samples, rows = [Image.new("RGB", (4, 4))] * 2, [{"prompt": "a"}, rest or {}]
    columns = {"seed": [7, 8], "row": [3, 4]}
    writer.write(5, 9, rows, samples, torch.tensor([1, 0]), torch.tensor([[0.5], [0.25]]), columns)


def test_a_table_has_prompts_rewards_columns_and_files(tmp_path):
    write(tmp_path, 1)
    table = pyarrow.parquet.read_table(tmp_path / "step-000005-rank1.parquet").to_pydict()
    assert table == {
        "seed": [7, 8],
        "row": [3, 4],
        "image": [None, "step-000005/0000.png"],  # the first of the rollout, wherever it is here
        "file": [None, "step-000005/0000.png"],
        "step": [5, 5],
        "prompt": ["a", ""],
        "text": [0.5, 0.25],
    }
    assert [path.name for path in tmp_path.glob("*/*")] == ["0000.png"]


def test_the_image_that_a_kept_sample_was_made_from_is_beside_it(tmp_path):
    write(tmp_path, 1, rest={"images": [Image.new("RGBA", (2048, 1024), "red"), Image.new("L", (16, 32), 255)]})
    table = pyarrow.parquet.read_table(tmp_path / "step-000005-rank1.parquet").to_pydict()
    assert table["input"] == [None, "step-000005/0000-input.png"]  # the first sample of the rollout
    with Image.open(tmp_path / table["input"][1]) as image:
        assert image.size == (512 + 4 + 128, 256)  # the second has the height of the first
        assert image.getpixel((0, 0)) == (255, 0, 0) and image.getpixel((600, 100)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("number", "options", "expected"),
    [
        (0, {}, ["step-000005-rank1.parquet"]),
        (0, {"writes_tables": False}, []),
        (2, {"writes_tables": False, "part": ""}, ["step-000005", "step-000005.parquet"]),
        (2, {"is_active": False}, []),
    ],
)
def test_what_is_written(tmp_path, number, options, expected):
    write(tmp_path, number, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
