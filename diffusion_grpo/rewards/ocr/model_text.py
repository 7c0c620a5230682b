"""The reward `text_by_model`: like `text`, but a transformers model reads the image."""

from __future__ import annotations

import dataclasses

from PIL import Image
from torch import nn

from ..contract import reads_text
from ..models.base import ModelReward
from ..needs import CONFIG, IMAGE_PROCESSOR, TOKENIZER, WEIGHTS, Source
from .text import Match, find_quoted, score_spelling

TURN_END = "<|im_end|>"


@reads_text
@dataclasses.dataclass(eq=False)
class ModelText(ModelReward):
    """Agreement between a transformers image-to-text model's reading and the quoted text or that of a column.

    TrOCR (https://arxiv.org/abs/2109.10282) reads an image of one line, GOT-OCR 2.0
    (`stepfun-ai/GOT-OCR-2.0-hf`, https://arxiv.org/abs/2409.01704) whole images. Decoding is greedy.
    """

    model: str = "microsoft/trocr-base-printed"
    max_new_tokens: int = 64
    target_column: str | None = None
    match: Match = "edit"
    ignore_case: bool = True
    ignore_spaces: bool = False

    def sources(self) -> list[Source]:
        return [Source("model", self.model, CONFIG + WEIGHTS + TOKENIZER + IMAGE_PROCESSOR, self.revision)]

    def load(self) -> nn.Module:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(self.model, revision=self.revision, backend="pil")
        return AutoModelForImageTextToText.from_pretrained(self.model, revision=self.revision, dtype=self.torch_dtype)

    def __call__(self, images: list[Image.Image], prompts: list[str], **columns) -> list[float | None]:
        """Return one score in [0, 1] per image; None if its prompt quotes no text or its column is empty."""
        column = self.target_column
        wanted = columns[column] if column else [find_quoted(prompt) for prompt in prompts]
        readings = self.in_batches(self.read, images)
        return score_spelling(readings, wanted, self.match, self.ignore_case, self.ignore_spaces)

    def read(self, network: nn.Module, images: list[Image.Image]) -> list[str]:
        """Read each image; join its lines with spaces."""
        inputs = self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        inputs = inputs.to(network.device, network.dtype)
        tokens = network.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=self.find_ends(network),
        )
        if not network.config.is_encoder_decoder:  # the output starts with the input tokens
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        readings = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [" ".join(reading.split()) for reading in readings]

    def find_ends(self, network: nn.Module) -> int | list[int] | None:
        """Return the ids of the tokens that end a reading; GOT-OCR's own configuration lacks its end of turn."""
        ends = network.generation_config.eos_token_id
        turn = self.processor.tokenizer.get_vocab().get(TURN_END)
        return (
            ends if turn is None else [turn, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])]
        )
