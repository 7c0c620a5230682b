"""Choose how progress is shown: bars in a terminal, a table in a notebook, lines elsewhere."""

import sys

import transformers.trainer
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback
from transformers.utils import is_in_notebook

from ..config.settings import DiffusionGRPOConfig
from .progress import BarsCallback, LinesCallback, UpdateProgress


def replace_progress(
    handler: CallbackHandler, args: DiffusionGRPOConfig, progress: UpdateProgress, prompts: str
) -> None:
    """Replace transformers' progress callback with one that shows rewards.

    Args:
        handler: handler of the trainer's callbacks; if the user has removed the progress callback, none is added.
        args: configuration of the run; `disable_tqdm` asks for lines.
        progress: progress of the current update.
        prompts: kind of the prompts in evaluations, "held-out" or "evaluation".
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
