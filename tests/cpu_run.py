"""What each process of a launcher on a CPU is: started by `test_launch.py`, writes a file."""

import sys
from pathlib import Path

from diffusion_grpo import DiffusionGRPOConfig

args = DiffusionGRPOConfig("out", num_generations=2)
Path(sys.argv[1], str(args.process_index)).write_text(f"{args.world_size} {args.use_cpu}")
