"""What holds for all tests: nothing is downloaded, and one thread is enough for tiny networks."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

import torch

torch.set_num_threads(1)
