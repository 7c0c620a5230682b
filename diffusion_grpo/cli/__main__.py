"""Run `python -m diffusion_grpo.cli`."""

import sys

from . import main

sys.exit(main())
