"""Choose how a running update is shown: bars in a terminal, a table in a notebook, lines elsewhere."""

import sys

import transformers.trainer
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback
from transformers.utils import is_in_notebook

from ..config.settings import DiffusionGRPOConfig
from .progress import BarsCallback, LinesCallback, UpdateProgress


def replace_progress(
    handler: CallbackHandler, args: DiffusionGRPOConfig, progress: UpdateProgress, prompts: str
) -> None:
    """Replace the callback with which transformers shows its progress by one that knows of rewards.

    Args:
        handler: of the trainer's callbacks; one in which the user has removed theirs is left without.
        args: `disable_tqdm` asks for lines.
        progress: of the running update.
        prompts: what evaluations are on, "held-out" or "evaluation".
    """
    kinds = (ProgressCallback, PrinterCallback, transformers.trainer.DEFAULT_PROGRESS_CALLBACK)
    removed = [callback for callback in handler.callbacks if type(callback) in kinds]  # the user's own stay
    if not removed:
        return
    for callback in removed:
        handler.remove_callback(callback)
    if args.disable_tqdm or not (is_in_notebook() or sys.stderr.isatty()):
        handler.add_callback(LinesCallback(progress, prompts))
    elif is_in_notebook():
        from .notebook import NotebookCallback  # needs IPython, which every notebook has

        handler.add_callback(NotebookCallback(progress, prompts))
    else:
        handler.add_callback(BarsCallback(progress, prompts))
