"""Log messages of other libraries that are of no use to users are dropped."""

import io
import logging


def test_messages_that_tell_nothing_are_dropped():
    for name, text, is_shown in (
        ("DeepSpeed", "Setting accelerator to CPU. If you have GPU ...", False),
        ("DeepSpeed", "something else", True),
        ("transformers.utils.import_utils", "`X` requires torchvision (not installed); falling back to `Y`", False),
    ):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).warning(text)
        logging.getLogger(name).removeHandler(handler)
        assert bool(stream.getvalue()) == is_shown
