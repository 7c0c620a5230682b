"""Check, before a model is loaded, that rewards have the packages and weights that they need.

Rewards load at their first call, after the first rollout, which a large run reaches late. A file that is not in the
cache is then downloaded, so it counts as missing only if the Hub lacks it or cannot be reached.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .contract import Reward

CONFIG = (("config.json",),)
WEIGHTS = (("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),)
TOKENIZER = (
    (
        *("tokenizer.json", "vocab.json", "vocab.txt"),
        *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model"),
    ),
    ("tokenizer_config.json", "config.json"),
)
IMAGE_PROCESSOR = (("preprocessor_config.json", "processor_config.json"),)


class Source(NamedTuple):
    """A Hub id or folder from which a reward reads files."""

    setting: str
    place: str
    files: tuple[tuple[str, ...], ...]
    revision: str = "main"

    def path(self, name: str) -> Path | None:
        """Return the path of the file with that name on this machine, or None."""
        folder = Path(self.place).expanduser()
        if folder.is_file():
            return folder if folder.suffix == Path(name).suffix else None
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.place, name, revision=self.revision)
        return Path(found) if isinstance(found, str) else None

    def find(self) -> list[str]:
        """Return the names of all files that are read, all of which are on this machine."""
        names = []
        for alternatives in self.files:
            first = next((name for name in alternatives if self.path(name) is not None), None)
            if first is None:
                raise FileNotFoundError(self._lacking(" or ".join(alternatives)))
            parts = _parts(self.path(first))
            for part in parts:
                if self.path(part) is None:
                    raise FileNotFoundError(self._lacking(f"{part}, which belongs to {first}"))
            names += [first, *parts]
        return names

    def check(self) -> None:
        """Raise FileNotFoundError if a file is neither here nor on the Hub."""
        folder = Path(self.place).expanduser()
        if not folder.exists():
            if not _is_hub_id(self.place):
                raise FileNotFoundError(
                    f"{self.setting}={self.place} is not a folder, and a Hub id has the form `owner/name`; correct it."
                )
            from huggingface_hub import constants

            if not constants.HF_HUB_OFFLINE:
                self._check_hub()
                return
        self.find()

    def _check_hub(self) -> None:
        from huggingface_hub import file_exists

        for alternatives in self.files:
            if any(self.path(name) is not None for name in alternatives):
                continue
            place = f"{self.setting}={self.place} (revision {self.revision})"
            try:
                is_there = any(file_exists(self.place, name, revision=self.revision) for name in alternatives)
            except Exception as error:  # a gated repository, or errors of the network
                reason = " ".join(str(error).split())[:200]
                raise FileNotFoundError(f"{place} is not in the cache and cannot be downloaded: {reason}") from error
            if not is_there:
                raise FileNotFoundError(f"{place} has no {' or '.join(alternatives)} on the Hub; correct it.")

    def _lacking(self, what: str) -> str:
        if Path(self.place).expanduser().is_dir():
            return f"{self.setting}={self.place} is a folder without {what}; name one that has it, or a Hub id."
        from huggingface_hub import constants

        return (
            f"HF_HUB_OFFLINE is set, and for {self.setting}={self.place} (revision {self.revision}) the cache "
            f"{constants.HF_HUB_CACHE} has no {what}; run `hf download {self.place} --revision {self.revision}` "
            f"with a network connection, or set {self.setting} to a folder."
        )


def check_needs(rewards: Iterable[Reward]) -> None:
    """Refuse rewards that will not be able to score: a package, a file or a server is missing.

    If a reward's function or object has an attribute `check_needs`, it is called with the reward's arguments and
    raises OSError, ImportError or ValueError.

    Args:
        rewards: from [`~diffusion_grpo.rewards.loading.load_rewards`].

    Raises:
        ValueError: something is missing that a reward needs; the message names the first such reward.

    Examples:
        >>> check_needs(load_rewards(["brightness", "color"]))  # these need nothing
    """
    for reward in rewards:
        check = _check_of(reward.function)
        if check is None:
            continue
        try:
            check(**reward.arguments)
        except (OSError, ImportError, ValueError) as error:
            raise ValueError(f"The reward {reward.name!r} cannot score: {error}") from error


def needs(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Mark a reward function with the check that `check_needs` is to call for it.

    Args:
        check: takes the reward's arguments by keyword; raises OSError, ImportError or ValueError if something is
            missing.

    Returns:
        The decorator.

    Examples:
        >>> from pathlib import Path
        >>> def weights_are_there(weights="scorer.pt", **others):
        ...     if not Path(weights).is_file():
        ...         raise FileNotFoundError(f"there is no {weights}; set weights to the scorer's file.")
        >>> @needs(weights_are_there)
        ... def scorer(images, weights="scorer.pt", **columns): ...
        >>> check_needs(load_rewards([scorer]))
        Traceback (most recent call last):
        ValueError: ...
    """

    def mark(function: Callable) -> Callable:
        function.check_needs = check
        return function

    return mark


def check_package(package: str, command: str) -> None:
    """Raise ImportError, with the command that installs it, if a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"the package {package} is not installed; install it with `{command}`.")


def _check_of(function: Callable) -> Callable | None:
    if not isinstance(function, functools.partial):
        return getattr(function, "check_needs", None)
    check = _check_of(function.func)
    return None if check is None else functools.partial(check, **function.keywords)


def _is_hub_id(place: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(place)
    except HFValidationError:
        return False
    return not place.startswith((".", "/", "~"))


def _parts(path: Path) -> list[str]:
    """Return the files without which this one is useless: those that an index names, or a vocabulary's merges."""
    if path.name == "vocab.json":
        return ["merges.txt"]
    if not path.name.endswith(".index.json"):
        return []
    try:
        return sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights; download the file again.") from error
