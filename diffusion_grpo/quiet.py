"""Messages of other libraries that tell a user of this one nothing: they are dropped, and nothing else is."""

import logging

# logger, and what its message says. torchvision is not needed for what diffusers asks of these processors, a machine
# without a GPU is nothing to be told by DeepSpeed, which is only looked for, and a LoRA of a denoiser has no keys for
# text encoders.
MESSAGES = {
    "transformers.utils.import_utils": "requires torchvision (not installed); falling back to",
    "diffusers.loaders.lora_base": "No LoRA keys associated to",
    "DeepSpeed": "Setting accelerator to CPU",
}


class _Without(logging.Filter):
    """Drop records whose message holds a text."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


def quiet_imports() -> None:
    """Drop `MESSAGES`; called before the libraries are imported that log them."""
    for name, text in MESSAGES.items():
        logging.getLogger(name).addFilter(_Without(text))
