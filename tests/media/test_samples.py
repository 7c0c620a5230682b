"""Convert samples to what rewards get, choose frames and copy values."""

import threading

import numpy as np
import pytest
import tiny_pipelines
import torch
from PIL import Image
from plain_images import flat

from diffusion_grpo.media.samples import (
    VideoWithSound,
    as_images,
    choose_evenly,
    convert_image,
    copy_value,
    count_bytes,
    extract_samples,
    find_sampling_rate,
)


def test_copies_are_alike() -> None:
    image = flat(7)
    image.format, image.filename, image.info["dpi"] = "PNG", "a.png", (72, 72)
    copied = copy_value(image)
    assert (copied.format, copied.filename, copied.info) == ("PNG", "a.png", {"dpi": (72, 72)})
    sound = np.full((2, 6), 0.25, dtype=np.float32)
    video = copy_value(VideoWithSound([flat(1)], sound, 24))
    assert type(video) is VideoWithSound and video.sampling_rate == 24 and (video.sound == sound).all()
    assert copy_value(("a", [1])) == ("a", [1]) and copy_value({1, 2}) == {1, 2}
    lock = threading.Lock()
    assert copy_value([lock])[0] is lock  # which cannot be copied
    palette = flat(7).convert("P")
    assert copy_value(palette).convert("RGB").tobytes() == palette.convert("RGB").tobytes()


class OnGPU(torch.Tensor):
    """A tensor as on a GPU: NumPy cannot read it, and `cpu` gives one that it can."""

    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_rewards_get_tensors_that_numpy_can_read() -> None:
    waveform, frames = torch.rand(2, 6), torch.rand(2, 8, 8, 3)
    for samples in ([waveform.as_subclass(OnGPU)], [waveform.clone().requires_grad_()]):
        assert (np.asarray(as_images(samples)[0]) == waveform.numpy()).all()
    assert np.asarray(as_images([waveform.bfloat16()])[0]).dtype == np.float32
    [plain] = as_images([frames.numpy()])
    [moved] = as_images([[frame.as_subclass(OnGPU) for frame in frames]])
    assert [image.tobytes() for image in moved] == [image.tobytes() for image in plain]
    samples = [waveform]
    assert as_images(samples) is samples  # nothing to move


def test_images_of_more_bits_are_scaled_to_eight() -> None:
    deep = Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))
    for mode in ("I;16", "I"):  # which of them depends on Pillow's version and the file
        assert np.asarray(convert_image(deep.convert(mode), None)).tolist() == [[0, 1, 255]]
    assert convert_image(deep, "RGB").getpixel((2, 0)) == (255, 255, 255)
    mask = Image.fromarray(np.array([[0, 255]], dtype=np.uint16))
    assert np.asarray(convert_image(mask, None)).tolist() == [[0, 255]]  # eight bits in a file of sixteen
    image = flat(7)
    assert convert_image(image, "RGB") is image and convert_image(image, "L").getpixel((0, 0)) == 7
    with pytest.raises(ValueError, match="holds floats"):
        convert_image(Image.new("F", (2, 2)), "RGB")


def test_the_memory_of_samples_is_counted() -> None:
    image = Image.new("RGB", (8, 5))
    assert count_bytes(image) == 160 and count_bytes([image, image]) == count_bytes((image,)) * 2 == 320
    assert count_bytes(torch.zeros(2, 3)) == count_bytes(np.zeros((2, 3), np.float32)) == 24
    assert count_bytes("sound") == 0


def test_the_first_and_the_last_evaluation_are_always_chosen():
    assert choose_evenly([0, 5], 8) == [0, 5] and choose_evenly([3], 8) == [3] and choose_evenly([], 8) == []
    steps = choose_evenly(list(range(0, 101, 5)), 8)
    assert len(steps) == 8 == len(set(steps)) and (steps[0], steps[-1]) == (0, 100)


def test_ltx2s_sound_comes_with_its_video():
    pipe, inputs = tiny_pipelines.build("ltx2")
    assert find_sampling_rate(pipe) == 24000  # the vocoder's, not the 16000 of the autoencoder before it
    assert find_sampling_rate(tiny_pipelines.build("wan")[0]) is None
    output = pipe(**inputs, num_inference_steps=2, output_type="pil")
    videos = extract_samples(pipe, output)
    assert [frame.size for frame in videos[1]] == [(32, 32)] * 5
    assert np.array_equal(videos[1].sound, output.audio[1].numpy()) and videos[1].sampling_rate == 24000
