"""Count what one steady update passes: `python benchmarks/trace.py` prints the package's files and functions.

The second of three updates of the embedded model is traced in the main thread: from its begin through its rollout to
its first backward pass, then also from the end of the first update to its own end, with optimizer, log and progress.
`--list` also prints the functions by file; a `+` marks those that only the whole update passes.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from peft import LoraConfig
from transformers import TrainerCallback

import diffusion_grpo
from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny

PACKAGE = str(Path(diffusion_grpo.__file__).parent)
Functions = dict[str, set[str]]


class TraceSecondUpdate(TrainerCallback):
    """Notes each function of the package that runs in the second update, and those before its first backward pass."""

    def __init__(self):
        self.whole: Functions = defaultdict(set)
        self.before_backward: Functions = defaultdict(set)
        self.is_before_backward = False

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_before_backward = state.global_step == 1

    def on_step_end(self, args, state, control, **kwargs):
        sys.setprofile(self.note if state.global_step == 1 else None)

    def end_at(self, backward):
        """Return `backward` as a call that ends the first part."""

        def call(*args, **kwargs):
            self.is_before_backward = False
            return backward(*args, **kwargs)

        return call

    def note(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(PACKAGE)[1:]
            self.whole[file].add(code.co_qualname)
            if self.is_before_backward:
                self.before_backward[file].add(code.co_qualname)


def count(functions: Functions) -> str:
    """Return the numbers of files and functions, in words."""
    return f"{len(functions)} files, {sum(map(len, functions.values()))} functions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions of each file")
    wants_list = parser.parse_args().list
    trace = TraceSecondUpdate()
    with tempfile.TemporaryDirectory() as folder:
        args = DiffusionGRPOConfig(folder, max_steps=3, report_to="none", save_strategy="no", disable_tqdm=True)
        lora = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"])
        trainer = DiffusionGRPOTrainer(
            "tiny", "color", args, tiny.prompts("train"), peft_config=lora, callbacks=[trace]
        )
        trainer.backend.backward = trace.end_at(trainer.backend.backward)
        trainer.train()
    for file, names in sorted(trace.whole.items()) if wants_list else ():
        marked = sorted((name not in trace.before_backward[file], name) for name in names)
        mark = " " if any(trace.before_backward[file]) else "+"
        print(f"{mark} {file}: {', '.join('+' * later + name for later, name in marked)}")
    first = {file: names for file, names in trace.before_backward.items() if names}
    print(f"{count(first)} before the first backward pass; {count(trace.whole)} in the whole update")


if __name__ == "__main__":
    main()
