"""Put what `gpu_check.py` needs into a folder that can be carried to a machine without a registry.

    python3.12 benchmarks/gpu_requirements.py .gpu --archive gpu_packages.tar.xz

installs `gpu_requirements.txt` into the folder, without what those packages need themselves, and leaves out what is
never used there. Run it under the Python version of the machine with the GPU, on the same kind of processor; nothing
but pip is needed. On that machine:

    mkdir -p .gpu && tar -xf gpu_packages.tar.xz -C .gpu
    python -m compileall -q -j 0 .gpu
    PYTHONPATH=.gpu:. python benchmarks/gpu_check.py
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "gpu_requirements.txt"
# left out: kernels for other GPUs and data types, OCR models that find lines (the demo's images are one), tests
UNUSED = (
    "bitsandbytes/libbitsandbytes_cuda*.so",
    "bitsandbytes/libbitsandbytes_rocm*.so",
    "bitsandbytes/libbitsandbytes_xpu*.so",
    "torchao/*.so",
    "rapidocr/models/*_det_*.onnx",
    "rapidocr/models/*_cls_*.onnx",
    "multiprocess/tests",
    "_multiprocess/tests",
    "dill/tests",
    "test",
    "bin",
)
MIB = 2**20


def install(folder: Path) -> None:
    """Install the requirements into a folder, by this Python's pip, without building DeepSpeed's kernels."""
    options = ["--no-deps", "--no-compile", "--quiet", "--upgrade", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, "-r", str(REQUIREMENTS)]
    subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})


def trim(folder: Path, cuda: str) -> None:
    """Remove what is not used.

    Args:
        folder: with the packages.
        cuda: version whose library of bitsandbytes is kept, without the dot: `130`.

    Raises:
        ValueError: bitsandbytes has none for that version.
    """
    kept = folder / "bitsandbytes" / f"libbitsandbytes_cuda{cuda}.so"
    if not kept.is_file():
        there = sorted(path.stem.rpartition("cuda")[2] for path in kept.parent.glob("libbitsandbytes_cuda*.so"))
        raise ValueError(f"bitsandbytes has no library for CUDA {cuda}; there are {', '.join(there)}.")
    for path in [path for pattern in UNUSED for path in folder.glob(pattern) if path != kept]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def pack(folder: Path, archive: Path) -> None:
    """Write the folder's content into a compressed archive."""
    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(folder.iterdir()):
            file.add(path, path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", type=Path, help="write the folder into this file too, for carrying: FILE.tar.xz")
    parser.add_argument("--cuda", default="130", help="of that machine's PyTorch; default: %(default)s")
    options = parser.parse_args()
    install(options.folder)
    try:
        trim(options.folder, options.cuda)
    except ValueError as error:
        parser.error(str(error))
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {size / MIB:.0f} MiB")
    if options.archive:
        pack(options.folder, options.archive)
        print(f"{options.archive}: {options.archive.stat().st_size / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
