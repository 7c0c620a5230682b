"""Images, videos and sound from every kind of column, and refusals that name row and column."""

import inspect
import json

import datasets
import numpy as np
import pytest
import torch
from diffusers import FluxKontextInpaintPipeline, FluxKontextPipeline, StableAudioPipeline, WanVACEPipeline
from PIL import Image, ImageChops

from diffusion_grpo.data.columns import Columns, RowError
from diffusion_grpo.data.prompts import load_prompts
from diffusion_grpo.media.files import write_sound, write_video

COLORS = ["red", "green", "blue"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three images, a video and a sound; datasets keeps its copies beside them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    for color in COLORS:
        Image.new("RGB", (16, 8), color).save(tmp_path / "files" / f"{color}.png")
    frames = [Image.new("RGB", (16, 8), color) for color in COLORS]
    write_video(frames, tmp_path / "files" / "a.mp4", fps=8)
    write_sound(np.stack([np.full(800, 0.5), np.full(800, -0.5)]), tmp_path / "files" / "a.wav", 8000)
    return tmp_path / "files"


def parameters(cls=FluxKontextPipeline):
    return inspect.signature(cls.__call__).parameters


def read(dataset, *indices, cls=FluxKontextPipeline):
    """Rows of a dataset that is checked for a pipeline."""
    columns = Columns(dataset, parameters(cls))
    columns.check("train_dataset")
    return columns.rows(list(indices))


def images_of(folder):
    return [Image.open(folder / f"{color}.png") for color in COLORS]


def structs(folder):
    return [{"bytes": (folder / f"{color}.png").read_bytes(), "path": None} for color in COLORS]


IMAGE = datasets.Image()
TABLES = {
    "pictures": lambda folder: datasets.Dataset.from_dict({"image": images_of(folder)}),
    "paths, Image": lambda folder: from_paths(folder).cast_column("image", IMAGE),
    "undecoded": lambda folder: from_paths(folder).cast_column("image", datasets.Image(decode=False)),
    "plain strings": lambda folder: from_paths(folder),
    "bytes and path": lambda folder: datasets.Dataset.from_dict({"image": structs(folder)}),
}


def from_paths(folder):
    return datasets.Dataset.from_dict({"image": [str(folder / f"{color}.png") for color in COLORS]})


def assert_same_picture(found, expected):
    assert isinstance(found, Image.Image) and found.size == expected.size
    assert ImageChops.difference(found.convert("RGB"), expected.convert("RGB")).getbbox() is None


@pytest.mark.parametrize("kind", TABLES)
def test_images(folder, kind):
    dataset = TABLES[kind](folder)
    rows = read(dataset, 2, 0, 2)
    assert_same_picture(rows[0]["image"], images_of(folder)[2])
    assert_same_picture(rows[1]["image"], images_of(folder)[0])
    assert rows[0] is rows[2]  # decoded once for all samples of a prompt
    assert_same_picture(read(dataset.select([1, 2]), 0)[0]["image"], images_of(folder)[1])


def test_lists_of_images_and_missing_ones(folder):
    paths = [str(folder / f"{color}.png") for color in COLORS]
    typed = datasets.Dataset.from_dict({"refs": [paths[:2], [], None]}).cast_column("refs", datasets.List(IMAGE))
    plain = datasets.Dataset.from_dict({"reference_images": [paths[:2], [], None]})
    large = plain.cast_column("reference_images", datasets.LargeList(datasets.Value("string")))
    for dataset, name in ((typed, "refs"), (plain, "reference_images"), (large, "reference_images")):
        first, second, third = (row[name] for row in read(dataset, 0, 1, 2, cls=WanVACEPipeline))
        assert_same_picture(first[1], images_of(folder)[1])
        assert second == [] and third is None
    single = datasets.Dataset.from_dict({"image": [paths[0], None]}).cast_column("image", IMAGE)
    assert read(single, 1)[0]["image"] is None


@pytest.mark.parametrize("kind", [datasets.Video(), datasets.Value("string"), datasets.Value("large_string")], ids=str)
def test_videos_are_lists_of_frames(folder, kind):
    dataset = datasets.Dataset.from_dict({"video": [str(folder / "a.mp4")]}).cast_column("video", kind)
    frames = read(dataset, 0, cls=WanVACEPipeline)[0]["video"]
    assert len(frames) == 3 and all(frame.size == (16, 8) for frame in frames)
    reds = [np.asarray(frame)[..., 0].mean() for frame in frames]
    assert reds[0] > 200 and max(reds[1:]) < 60


def test_sound_is_a_tensor_at_the_rate_that_the_type_asks_for(folder):
    plain = datasets.Dataset.from_dict({"initial_audio_waveforms": [str(folder / "a.wav")]})
    sound = read(plain, 0, cls=StableAudioPipeline)[0]["initial_audio_waveforms"]
    assert sound.shape == (2, 800) and sound.dtype == torch.float32
    assert torch.allclose(sound.mean(1), torch.tensor([0.5, -0.5]), atol=1e-3)
    typed = plain.cast_column("initial_audio_waveforms", datasets.Audio(sampling_rate=4000, num_channels=1))
    mono = Columns(typed, {}).rows([0])[0]["initial_audio_waveforms"]
    assert mono.shape[0] == 1 and abs(mono.shape[1] - 400) <= 4
    assert mono.abs().max() < 1e-3  # the two channels cancel


def test_columns_that_take_text_or_that_no_parameter_takes_stay_strings(folder):
    path = str(folder / "red.png")
    row = {"prompt": path, "negative_prompt": path, "target": path}
    assert read(datasets.Dataset.from_list([row]), 0) == [row]


def test_columns_of_media_are_told_by_their_type_or_their_first_row(folder):
    dataset = datasets.Dataset.from_dict({"typed": images_of(folder), "text": COLORS, "prompt": ["a.png"] * 3})
    dataset = dataset.add_column("paths", [["red.png", None]] * 3).add_column("path", ["a.mp4"] * 3)
    columns = Columns(dataset, {})
    assert columns.list_media() == ["typed", "paths", "path"]
    assert_same_picture(columns.rows([1])[0]["typed"], images_of(folder)[1])  # which only rewards take


def test_a_dataset_with_a_format_of_its_own_gives_what_it_gives(folder):
    dataset = datasets.Dataset.from_dict({"image": images_of(folder)})
    dataset.set_transform(lambda batch: {"image": [image.size for image in batch["image"]]})
    assert Columns(dataset, parameters()).rows([0])[0]["image"] == (16, 8)


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_a_format_changes_no_text_number_or_image(folder, form):
    rows = {"image": images_of(folder), "height": [16, 32, None], "scale": [0.1, 0.2, 0.3], "note": ["a", None, "c"]}
    rows |= {"words": [["x"], [], None], "prompt_embeds": torch.ones(3, 2, 4).tolist(), "boxes": [[1, 2], [3, 4], [5]]}
    dataset = datasets.Dataset.from_dict(rows)
    for row, expected in zip(read(dataset.with_format(form), 2, 0), read(dataset, 2, 0), strict=True):
        assert list(row) == list(expected)
        assert_same_picture(row.pop("image"), expected.pop("image"))
        assert torch.equal(row.pop("prompt_embeds"), expected.pop("prompt_embeds"))
        assert row == expected and {*map(type, row.values())} <= {int, float, str, list, type(None)}


def test_paths_in_a_file_are_relative_to_its_folder(folder):
    first = {"prompt": "x.png", "image": ["red.png", "blue.png"], "notes": ["red.png", "no file"], "target": "red.png"}
    rows = [first, {"prompt": "b", "image": None, "notes": None, "target": "https://x/a.png"}]
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load_prompts(str(folder / "edits.jsonl"))
    assert dataset.column_names == ["prompt", "image", "notes", "target"]
    red, blue = (str(folder / f"{color}.png") for color in ("red", "blue"))
    assert dataset[:] == {
        "prompt": ["x.png", "b"],
        "image": [[red, blue], None],
        "notes": [["red.png", "no file"], None],
        "target": [red, "https://x/a.png"],
    }
    Columns(dataset, parameters()).check("train_dataset")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gone.png", "train_dataset, row 2001 .*'image': there is no file gone.png .paths are relative"),
        ("/gone.png", "column 'image': there is no file /gone.png\\.$"),
        ("https://somewhere/a.png", "row 1 .*https://somewhere/a.png is a network address"),
        ("iVBORw0KGgo" * 100, "row 1 .{0,40}'image': iVBOR.{0,100}base64"),
    ],
)
@pytest.mark.parametrize("feature", [None, IMAGE, datasets.Image(decode=False)], ids=str)
def test_refused_before_a_model_is_loaded(folder, value, message, feature):
    good = [str(folder / "red.png")]
    dataset = datasets.Dataset.from_dict({"image": good * (2001 if "relative" in message else 1) + [value]})
    dataset = dataset if feature is None else dataset.cast_column("image", feature)
    with pytest.raises(ValueError, match=message) as refusal:
        Columns(dataset, parameters()).check("train_dataset")
    assert len(str(refusal.value)) < 300


def test_a_broken_file_is_named(folder):
    (folder / "broken.png").write_bytes(b"no picture")
    dataset = datasets.Dataset.from_dict({"image": [str(folder / "red.png"), str(folder / "broken.png")]})
    with pytest.raises(RowError, match="Row 1 .*column 'image': cannot identify image file"):
        read(dataset, 0, 1)


def test_the_pipeline_gets_images_in_its_mode(folder):
    """Four channels would be taken for latents by some pipelines, and one channel stops others in mid-run."""
    taken = parameters(FluxKontextInpaintPipeline)
    for mode in ("RGBA", "L"):
        picture = Image.new(mode, (16, 8), 77)
        picture.save(folder / f"{mode}.png")
        path = [str(folder / f"{mode}.png")]
        for image in (datasets.Dataset.from_dict({"image": path}), datasets.Dataset.from_dict({"image": [picture]})):
            image = image.add_column("mask_image", path).cast_column("mask_image", IMAGE)
            image = image.add_column("target", path).cast_column("target", IMAGE)
            (row,) = Columns(image, taken).rows([0])
            assert [row[name].mode for name in ("image", "mask_image", "target")] == ["RGB", mode, mode]
            assert Columns(image, taken, "RGBA").rows([0])[0]["image"].mode == "RGBA"
            typed = image.cast_column("image", datasets.Image(mode="L"))
            assert Columns(typed, taken).rows([0])[0]["image"].mode == "L"
        made = {"image": [picture], "mask_image": [picture]}
        dataset = datasets.Dataset.from_dict({"prompt": ["a"]}).with_transform(lambda batch, made=made: made)
        (row,) = Columns(dataset, taken).rows([0])
        assert (row["image"].mode, row["mask_image"].mode) == ("RGB", mode)
        lists = datasets.Dataset.from_dict({"reference_images": [[picture, picture]]})
        (row,) = Columns(lists, parameters(WanVACEPipeline)).rows([0])
        assert [image.mode for image in row["reference_images"]] == ["RGB", "RGB"]


def test_a_transform_that_fails_names_the_row(folder):
    def read(batch):
        return {"image": [Image.open(path) for path in batch["image"]]}

    (folder / "broken.png").write_bytes(b"no picture")
    paths = [str(folder / "red.png"), str(folder / "broken.png")]
    columns = Columns(datasets.Dataset.from_dict({"image": paths}).with_transform(read), parameters())
    assert columns.rows([0])[0]["image"].size == (16, 8)
    with pytest.raises(RowError, match="Row 1 .*transform failed with UnidentifiedImageError: cannot identify"):
        columns.rows([1])


def test_sixteen_bits_are_scaled_and_not_clipped(folder):
    """Pillow would make a depth map white beyond 255 of 65535."""
    ramp = Image.fromarray(np.linspace(0, 65535, 16 * 8).astype(np.uint16).reshape(8, 16))
    ramp.save(folder / "ramp.png")
    paths = [str(folder / "ramp.png")]
    typed = datasets.Dataset.from_dict({"image": paths, "mask_image": paths, "target": paths})
    typed = typed.cast_column("mask_image", IMAGE).cast_column("target", IMAGE)
    taken = parameters(FluxKontextInpaintPipeline)
    for dataset in (typed, typed.cast_column("image", IMAGE), typed.cast_column("image", datasets.Image(mode="L"))):
        (row,) = Columns(dataset, taken).rows([0])
        for name in ("image", "mask_image"):
            pixels = np.asarray(row[name].convert("L"))
            assert abs(pixels - np.linspace(0, 255, 16 * 8).reshape(8, 16)).max() <= 1
        assert row["mask_image"].mode == "L" and row["target"].mode == "I;16"  # the reward gets its own
