"""Keep the terminal quiet: drop useless or repeated messages and progress bars, replace characters that it lacks."""

import io
import logging
import sys
import warnings

# Logger and text in the message. diffusers uses these processors in ways that do not need torchvision. A denoiser's
# LoRA has no keys for text encoders. DeepSpeed logs the missing GPU although it is only looked up. torchao lacks the
# kernels of GPUs that are not there, diffusers looks for tensors that it no longer has, and its int8 works in float32.
MESSAGES = (
    ("transformers.utils.import_utils", "requires torchvision (not installed); falling back to"),
    ("diffusers.loaders.lora_base", "No LoRA keys associated to"),
    ("DeepSpeed", "Setting accelerator to CPU"),
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is an Enum subclass and is now natively supported"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao` Tensor objects"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "for integer quantization, but only bfloat16 is supported"),
)
# DeepSpeed gathers weights by functions that torch has renamed, and is told so each time.
DEPRECATION = r"`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


class _DropText(logging.Filter):
    """A filter that drops the records whose message contains a text."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


def quiet_imports() -> None:
    """Drop `MESSAGES` and `DEPRECATION`. Call this before importing the libraries that log them."""
    for name, text in MESSAGES:
        logging.getLogger(name).addFilter(_DropText(text))
    warnings.filterwarnings("ignore", DEPRECATION, FutureWarning)


def replace_unprintable() -> None:
    """Have stdout replace characters that its encoding lacks, such as `±` in ASCII, where it would raise."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # also in the C locale, where Python escapes only surrogates
        sys.stdout.reconfigure(errors="replace")


def hide_loading_bars(model: str) -> None:
    """Hide the loading bars for the embedded model, which loads at once."""
    if model == "tiny":
        import diffusers
        import transformers

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()


_cuts: set[str] = set()  # messages of diffusers that a prompt is cut for CLIP


def _is_no_known_cut(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    is_known = text in _cuts
    if "was truncated because CLIP can only handle" in text:
        _cuts.add(text)
    return not is_known


def say_cuts_once() -> None:
    """Let diffusers say once per prompt that it is cut for CLIP, not in each rollout."""
    for handler in logging.getLogger("diffusers").handlers:
        handler.addFilter(_is_no_known_cut)  # once, however often it is added
