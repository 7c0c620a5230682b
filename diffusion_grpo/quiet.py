"""Log messages of other libraries that are of no use to our users, and the filter that drops them."""

import logging

# Logger: text in the message. diffusers uses these processors in ways that do not need torchvision. A denoiser's LoRA
# has no keys for text encoders. DeepSpeed logs the missing GPU although it is only looked up.
MESSAGES = {
    "transformers.utils.import_utils": "requires torchvision (not installed); falling back to",
    "diffusers.loaders.lora_base": "No LoRA keys associated to",
    "DeepSpeed": "Setting accelerator to CPU",
}


class _DropText(logging.Filter):
    """A filter that drops the records whose message contains a text."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


def quiet_imports() -> None:
    """Drop `MESSAGES`. Call this before importing the libraries that log them."""
    for name, text in MESSAGES.items():
        logging.getLogger(name).addFilter(_DropText(text))
