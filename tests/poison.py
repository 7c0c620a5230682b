"""Files that would run code if they were unpickled."""

import os
import pickle

import torch


class Poison:
    """Unpickled, it makes a folder."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def write_poison(path, mark):
    """Write it as `torch.save` does, or as a plain pickle."""
    if path.suffix in (".pt", ".pth", ".bin"):
        torch.save({"state": Poison(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(Poison(mark)))
