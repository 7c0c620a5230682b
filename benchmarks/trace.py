"""Count what one steady update passes: `python benchmarks/trace.py` prints the package's files and functions.

The second of three updates of the embedded model is traced in the main thread, rollout included. `--list`
also prints the functions by file.
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


class TraceSecondUpdate(TrainerCallback):
    """Notes each function of the package that runs between the first update's end and the second's."""

    def __init__(self):
        self.functions: dict[str, set[str]] = defaultdict(set)

    def on_step_end(self, args, state, control, **kwargs):
        trace = self.note if state.global_step == 1 else None
        sys.setprofile(trace)

    def note(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.functions[code.co_filename.removeprefix(PACKAGE)[1:]].add(code.co_qualname)


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
        trainer.train()
    for file, names in sorted(trace.functions.items()) if wants_list else ():
        print(f"{file}: {', '.join(sorted(names))}")
    print(f"{len(trace.functions)} files, {sum(map(len, trace.functions.values()))} functions")


if __name__ == "__main__":
    main()
