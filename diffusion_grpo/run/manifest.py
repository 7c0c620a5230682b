"""Verify a checkpoint by a manifest: a list of its files with sizes and hashes, which is written last."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
THREADS = 8


class ResumeError(ValueError):
    """A run cannot start in its folder, or cannot resume from the requested checkpoint.

    Examples:
        >>> from diffusion_grpo.run.resume_point import refuse_used_folder
        >>> Path(folder, "checkpoint-5").mkdir()
        >>> refuse_used_folder(Path(folder))
        Traceback (most recent call last):
        ResumeError: ...
    """


class DamagedCheckpoint(ResumeError):
    """A file of a checkpoint is missing or has changed.

    Examples:
        >>> written = Path(folder, "weights.txt").write_text("3.14")
        >>> write_manifest(Path(folder))
        >>> written = Path(folder, "weights.txt").write_text("2.72")
        >>> check_manifest(Path(folder))
        Traceback (most recent call last):
        DamagedCheckpoint: ...
    """


def write_manifest(folder: Path) -> None:
    """Write a manifest of all files under `folder`; call it once, after every process has written its files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(_hash, files)
        listed = {
            path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": value}
            for path, value in zip(files, hashes, strict=True)
        }
    (folder / MANIFEST).write_text(json.dumps({"files": listed}, indent=1), encoding="utf-8")


def check_manifest(folder: Path) -> None:
    """Compare the files with the manifest: names and sizes first, then the contents."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {folder / name: (entry["size"], entry["sha256"]) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST} cannot be read") from None
    for path, (size, _) in expected.items():
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder} is damaged: {path.relative_to(folder)} is missing")
        if path.stat().st_size != size:
            found = path.stat().st_size
            raise DamagedCheckpoint(
                f"{folder} is damaged: {path.relative_to(folder)} has {found} bytes, and {size} were written"
            )
    with ThreadPoolExecutor(THREADS) as pool:
        for path, found in zip(expected, pool.map(_hash, expected), strict=True):
            if found != expected[path][1]:
                raise DamagedCheckpoint(
                    f"{folder} is damaged: {path.relative_to(folder)} is not what was written (its SHA-256 differs)"
                )


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
