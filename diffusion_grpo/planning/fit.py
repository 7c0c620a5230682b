"""Search for settings that make a run fit into accelerator memory of a given size, the fastest ones first.

Each candidate is planned like any run, so settings that contradict each other drop out by themselves. Nothing is
written: the settings that are found are printed for the user to paste.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import yaml

from ..config.arguments import LaunchArguments
from ..config.settings import DiffusionGRPOConfig
from ..training.memory import format_size
from ..training.out_of_memory import shrink_factor, smallest_divisor
from .measure import DECODING, UPDATE
from .memory import Memory
from .plan import Cache, Plan, plan, read_run

RESERVE = 0.08  # share of the memory left for CUDA, workspaces of kernels, and fragmentation
LEAST_SAVING = 0.001  # settings that save a smaller share of all bytes are skipped
ONLY_DECODING = ("samples decoded one by one",)  # save only if decoding needs the most memory

Settings = dict[str, Any]


@dataclass
class Choice:
    """Settings that were chosen together."""

    name: str
    settings: Settings
    cost: str
    saved: int = 0


@dataclass
class Fit:
    """Result of a search for settings that make a run fit."""

    size: int
    usable: int
    before: Memory
    after: Memory
    choices: list[Choice]
    notes: list[str]

    @property
    def fits(self) -> bool:
        return self.after.accelerator <= self.usable

    @property
    def settings(self) -> Settings:
        return merge(self.choices)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "settings": self.settings}

    def to_yaml(self) -> str:
        """Return the settings as lines to paste, each choice with what it saves and costs."""
        lines = []
        for choice in self.choices:
            chosen = {name: value for name, value in choice.settings.items() if self.settings[name] == value}
            first, *rest = yaml.safe_dump(chosen, sort_keys=False).splitlines() or [f"# {choice.name}"]
            lines += [f"{first}  # saves {format_size(choice.saved)}; {choice.cost}", *rest]
        return "\n".join(lines)


def merge(choices: list[Choice]) -> Settings:
    """Return the settings of several choices; later ones win."""
    return {name: value for choice in choices for name, value in choice.settings.items()}


def count_usable(size: int) -> int:
    """Return how many bytes of an accelerator a plan may use."""
    return int(size * (1 - RESERVE))


# Possible changes, from the cheapest to the most expensive


def divide_micro_batch(args: DiffusionGRPOConfig) -> Settings:
    """Divide the micro-batch and multiply the accumulation: an update trains on as many samples as before."""
    divisor = shrink_factor(args)
    size = args.per_device_train_batch_size // divisor
    settings = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": divisor * args.gradient_accumulation_steps,
        "steps_per_generation": divisor * args.micro_batches_per_rollout,
    }
    # evaluations are not planned
    is_larger = (args.per_device_eval_batch_size or 0) > size
    return {} if divisor == 1 else settings | ({"per_device_eval_batch_size": size} if is_larger else {})


def shrink_rollout_calls(args: DiffusionGRPOConfig) -> Settings:
    """Divide the number of samples per call of a rollout."""
    size = args.rollout_batch_size or 1
    return {} if size == 1 else {"rollout_batch_size": size // smallest_divisor(size)}


def checkpoint(args: DiffusionGRPOConfig) -> Settings:
    """Recompute activations of all blocks."""
    every = {} if args.selective_checkpointing == 1 else {"selective_checkpointing": 1.0}
    return {"gradient_checkpointing": True, **every} if every or not args.activation_checkpointing else {}


def quantise(settings: Settings, args: DiffusionGRPOConfig) -> Settings:
    """Load the network and the large text encoders in 8 or 4 bit, unless they are smaller or swapped already."""
    return {} if args.load_in_4bit or args.quantization or args.group_offload is not None else settings


def swap_blocks(args: DiffusionGRPOConfig) -> Settings:
    """Keep the network's frozen weights in CPU memory; without checkpointing, this would be slow."""
    swap = {"group_offload": "block_level", "group_offload_stream": True, "gradient_checkpointing": True}
    plain = {"load_in_4bit": False, "load_in_8bit": False}
    return {} if args.group_offload is not None or args.quantization else swap | plain


STEPS: dict[str, tuple[Settings | Callable[[DiffusionGRPOConfig], Settings], str]] = {  # and their cost in words
    "smaller rollout calls": (shrink_rollout_calls, "the same samples in more, smaller calls"),
    "smaller micro-batches": (divide_micro_batch, "the same samples in more, smaller passes"),
    "gradient checkpointing": (checkpoint, "one more forward pass per update"),
    "recorded steps on the CPU": ({"offload_trajectories": True}, "copies"),
    "frozen parts on the CPU": ({"offload_frozen": "cpu"}, "copies in each rollout"),
    "reference on the CPU": ({"offload_ref_model": True}, "copies in each update"),
    "prompts encoded once": ({"cache_prompt_embeds": "disk"}, "time before the run, but none during it"),
    "samples decoded one by one": ({"decode_batch_size": 1}, "smaller passes of the VAE"),
    "decoding in tiles": ({"vae_tiling": True}, "tiles overlap, and samples change where they do"),
    "8-bit optimizer": (
        lambda args: {"optim": "adamw_bnb_8bit"} if args.optim in ("adamw_torch", "adamw_torch_fused") else {},
        "rounded states",
    ),
    "8-bit weights": (partial(quantise, {"load_in_8bit": True}), "slower layers, rounded weights"),
    "4-bit weights": (
        partial(quantise, {"load_in_4bit": True, "load_in_8bit": False}),
        "slower layers, coarser weights",
    ),
    "block swap": (swap_blocks, "the network's weights are transferred in each pass"),
}


def propose(name: str, args: DiffusionGRPOConfig) -> Settings:
    """Return the settings of a step that a run does not have yet."""
    step = STEPS[name][0]
    settings = step(args) if callable(step) else step
    return {key: value for key, value in settings.items() if getattr(args, key) != value}


class Search:
    """Plans candidates for one configuration."""

    def __init__(
        self,
        config_file: str | None,
        overrides: list[str],
        launch: LaunchArguments | None,
        usable: int,
        cache: Cache | None = None,
    ):
        self._config_file, self._overrides, self._launch, self._usable = config_file, overrides, launch, usable
        self._cache = {} if cache is None else cache
        self._totals: dict[str, Memory | None] = {}

    def plan(self, settings: Settings) -> Plan:
        """Plan the run with `settings` on top of those of the user."""
        return plan(self._config_file, [*self._overrides, *write_words(settings)], self._launch, self._cache)

    def add_up(self, choices: list[Choice]) -> Memory | None:
        """Return the peak memory; None if the settings are refused or the phases cannot be planned."""
        key = yaml.safe_dump(merge(choices))
        if key not in self._totals:
            try:
                made = self.plan(merge(choices))
                is_planned = any(item.phase == UPDATE for item in made.memory)
                self._totals[key] = made.total if is_planned else None
            except (ValueError, ImportError):
                self._totals[key] = None
        return self._totals[key]

    def read(self, settings: Settings) -> DiffusionGRPOConfig:
        """Return the settings of the run with `settings` on top of those of the user."""
        words = [*self._overrides, *write_words(settings)]
        return read_run(self._config_file, words, self._launch)[0][2]

    def find(self) -> list[Choice]:
        """Add the cheapest settings that save something until the run fits or nothing is left."""
        choices: list[Choice] = []
        is_changed = True
        while is_changed:
            is_changed = False
            for name in STEPS:
                while (larger := self._take_step(name, choices)) is not None:
                    choices, is_changed = larger, True
        return self._drop_idle(choices)

    def _take_step(self, name: str, choices: list[Choice]) -> list[Choice] | None:
        """Return the choices with one step more; None if the run fits already or the step saves nothing."""
        before = self.add_up(choices)
        if before.accelerator <= self._usable or name in ONLY_DECODING and before.phase != DECODING:
            return None
        proposed = propose(name, self.read(merge(choices)))
        if not proposed:
            return None
        others = [choice for choice in choices if choice.name != name]
        earlier = merge([choice for choice in choices if choice.name == name])
        larger = [*others, Choice(name, earlier | proposed, STEPS[name][1])]
        after = self.add_up(larger)
        saves = after is not None and before.accelerator - after.accelerator >= LEAST_SAVING * before.accelerator
        return larger if saves else None

    def _drop_idle(self, choices: list[Choice]) -> list[Choice]:
        """Drop choices that later ones made unnecessary, the most expensive first; note what the others save."""
        order = list(STEPS)
        choices = sorted(choices, key=lambda choice: order.index(choice.name))
        limit = max(self._usable, self.add_up(choices).accelerator)
        for choice in reversed(choices):
            rest = [other for other in choices if other is not choice]
            without = self.add_up(rest)
            if without is not None and without.accelerator <= limit:
                choices = rest
        after = self.add_up(choices).accelerator
        for choice in choices:
            without = self.add_up([other for other in choices if other is not choice])
            choice.saved = 0 if without is None else max(0, without.accelerator - after)
        return choices


def write_words(settings: Settings) -> list[str]:
    """Return settings as arguments of the command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", yaml.safe_dump(value).split("\n")[0])]


def fit(
    config_file: str | None,
    overrides: list[str],
    size: int,
    launch: LaunchArguments | None = None,
    cache: Cache | None = None,
) -> Fit:
    """Find the cheapest settings with which a run fits."""
    usable = count_usable(size)
    search = Search(config_file, overrides, launch, usable, cache)
    made = search.plan({})
    if not any(item.phase == UPDATE for item in made.memory):
        raise ValueError(" ".join(["The memory of this run cannot be planned, so nothing is fitted.", *made.notes]))
    choices = search.find()
    after = search.plan(merge(choices))
    return Fit(size, usable, made.total, after.total, choices, after.notes)
