"""Log messages of other libraries that are of no use to users are dropped."""

import io
import logging
import warnings

from diffusion_grpo.quiet import quiet_imports


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


def test_names_that_torch_has_renamed_are_no_warning_for_our_users():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet_imports()
        for name in ("torch.distributed.all_gather_into_tensor", "other"):
            warnings.warn(f"`{name}` is deprecated.", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["`other` is deprecated."]
