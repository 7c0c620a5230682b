"""Search for settings that make a run fit into accelerator memory of a given size, the fastest ones first.

Each candidate is planned like any run, so settings that contradict each other drop out by themselves. Nothing is
written: the settings that are found are printed for the user to paste.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from ..config.arguments import LaunchArguments
from ..config.settings import DiffusionGRPOConfig
from ..training.memory import format_size
from ..training.out_of_memory import shrink_factor, smallest_divisor
from .measure import DECODING, UPDATE
from .memory import Memory
from .plan import Built, Plan, plan, read_run

RESERVE = 0.08  # share of the memory left for CUDA, workspaces of kernels, and fragmentation
LEAST_SAVING = 0.001  # settings that save a smaller share of all bytes are skipped
ONLY_DECODING = ("samples decoded one by one",)  # save only if decoding needs the most memory

Settings = dict[str, Any]
Propose = Callable[[DiffusionGRPOConfig], Settings | None]


@dataclass
class Choice:
    """Settings that were chosen together."""

    name: str
    settings: Settings
    saved: int = 0
    cost: str = ""


@dataclass
class Fit:
    """Result of a search for settings that make a run fit."""

    size: int
    usable: int
    before: Memory
    after: Memory
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the run fits with the choices."""
        return self.after.accelerator <= self.usable

    @property
    def settings(self) -> Settings:
        """All chosen settings."""
        return merge(self.choices)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON."""
        return asdict(self) | {"fits": self.fits, "settings": self.settings}

    def to_yaml(self) -> str:
        """Return the settings as lines to paste, each choice with what it saves and costs."""
        lines = []
        for choice in self.choices:
            kept = {name: value for name, value in choice.settings.items() if self.settings[name] == value}
            first, *rest = yaml.safe_dump(kept, sort_keys=False).splitlines() or [f"# {choice.name}"]
            cost = f"; {choice.cost}" if choice.cost else ""
            lines += [f"{first}  # saves {format_size(choice.saved)}{cost}", *rest]
        return "\n".join(lines)


def merge(choices: list[Choice]) -> Settings:
    """Return the settings of several choices; later ones win."""
    return {name: value for choice in choices for name, value in choice.settings.items()}


def count_usable(size: int) -> int:
    """Return how many bytes of an accelerator a plan may use."""
    return int(size * (1 - RESERVE))


# Possible changes, from the cheapest to the most expensive


def divide_micro_batch(args: DiffusionGRPOConfig) -> Settings | None:
    """Divide the micro-batch and multiply the accumulation: an update trains on as many samples as before.

    If evaluations have a larger batch size of their own, it is reduced to that of training, since it is not planned.
    """
    size, divisor = args.per_device_train_batch_size, shrink_factor(args)
    if divisor == 1:
        return None
    found = {
        "per_device_train_batch_size": size // divisor,
        "gradient_accumulation_steps": divisor * args.gradient_accumulation_steps,
        "steps_per_generation": divisor * args.micro_batches_per_rollout,
    }
    is_larger = (args.per_device_eval_batch_size or 0) > size // divisor
    return found | ({"per_device_eval_batch_size": size // divisor} if is_larger else {})


def shrink_rollout_calls(args: DiffusionGRPOConfig) -> Settings | None:
    """Divide the number of samples per call of a rollout."""
    size = args.rollout_batch_size
    return None if size in (None, 1) else {"rollout_batch_size": size // smallest_divisor(size)}


def checkpoint(args: DiffusionGRPOConfig) -> Settings | None:
    """Recompute activations."""
    if args.activation_checkpointing and args.selective_checkpointing == 1:
        return None
    every = {} if args.selective_checkpointing == 1 else {"selective_checkpointing": 1.0}
    return {"gradient_checkpointing": True} | every


def offload_frozen(args: DiffusionGRPOConfig) -> Settings | None:
    """Keep text encoders and VAE in CPU memory while the network works."""
    return None if args.offload_frozen is not None else {"offload_frozen": "cpu"}


def offload_trajectories(args: DiffusionGRPOConfig) -> Settings | None:
    """Keep the recorded trajectories in CPU memory."""
    return None if args.offload_trajectories else {"offload_trajectories": True}


def offload_reference(args: DiffusionGRPOConfig) -> Settings | None:
    """Keep a copied reference in CPU memory."""
    return {"offload_ref_model": True} if args.needs_reference and not args.offload_ref_model else None


def cache_prompts(args: DiffusionGRPOConfig) -> Settings | None:
    """Encode all prompts once, before the network is loaded."""
    return {"cache_prompt_embeds": "disk"} if args.cache_prompt_embeds == "off" else None


def decode_singly(args: DiffusionGRPOConfig) -> Settings | None:
    """Decode one sample at a time."""
    return None if args.decode_batch_size == 1 else {"decode_batch_size": 1}


def tile_decoding(args: DiffusionGRPOConfig) -> Settings | None:
    """Decode in tiles."""
    return None if args.vae_tiling else {"vae_tiling": True}


def shrink_optimizer(args: DiffusionGRPOConfig) -> Settings | None:
    """Keep AdamW's states in 8 bit."""
    name = getattr(args.optim, "value", args.optim)
    return {"optim": "adamw_bnb_8bit"} if name in ("adamw_torch", "adamw_torch_fused") else None


def quantise(bits: int) -> Propose:
    """Return a function that proposes to load the network and the large text encoders in 8 or 4 bit."""

    def propose(args: DiffusionGRPOConfig) -> Settings | None:
        taken = args.load_in_4bit or args.quantization
        if taken or args.group_offload is not None:
            return None
        if bits == 8:
            return None if args.load_in_8bit else {"load_in_8bit": True}
        return {"load_in_4bit": True} | ({"load_in_8bit": False} if args.load_in_8bit else {})

    return propose


def swap_blocks(args: DiffusionGRPOConfig) -> Settings | None:
    """Keep the network's frozen weights in CPU memory; without checkpointing, this would be slow."""
    if args.group_offload is not None or args.quantization:
        return None
    quantised = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(args, name)]
    swap = {"group_offload": "block_level", "group_offload_stream": True, "gradient_checkpointing": True}
    return swap | dict.fromkeys(quantised, False)


STEPS: dict[str, tuple[Propose, str]] = {  # name: function that proposes the settings, and their cost in words
    "smaller rollout calls": (shrink_rollout_calls, "the same samples in more, smaller calls"),
    "smaller micro-batches": (divide_micro_batch, "the same samples in more, smaller passes"),
    "gradient checkpointing": (checkpoint, "one more forward pass per update"),
    "recorded steps on the CPU": (offload_trajectories, "copies"),
    "frozen parts on the CPU": (offload_frozen, "copies in each rollout"),
    "reference on the CPU": (offload_reference, "copies in each update"),
    "prompts encoded once": (cache_prompts, "time before the run, but none during it"),
    "samples decoded one by one": (decode_singly, "smaller passes of the VAE"),
    "decoding in tiles": (tile_decoding, "tiles overlap, and samples change where they do"),
    "8-bit optimizer": (shrink_optimizer, "rounded states"),
    "8-bit weights": (quantise(8), "slower layers, rounded weights"),
    "4-bit weights": (quantise(4), "slower layers, coarser weights"),
    "block swap": (swap_blocks, "the network's weights are transferred in each pass"),
}


class Search:
    """Plans candidates for one configuration."""

    def __init__(
        self,
        config_file: str | None,
        overrides: list[str],
        launch: LaunchArguments | None,
        usable: int,
        built: Built | None = None,
    ):
        self._config_file, self._overrides, self._launch = config_file, overrides, launch
        self._usable = usable
        self._built = built or Built()
        self._totals: dict[str, Memory | None] = {}

    def plan(self, settings: Settings) -> Plan:
        """Plan the run with `settings` on top of those of the user."""
        return plan(self._config_file, [*self._overrides, *write_words(settings)], self._launch, self._built)

    def count(self, settings: Settings) -> int | None:
        """Return the peak memory in bytes; None if the settings are refused or the phases cannot be planned."""
        total = self._add_up(settings)
        return None if total is None else total.accelerator

    def _add_up(self, settings: Settings) -> Memory | None:
        key = yaml.safe_dump(settings)
        if key not in self._totals:
            self._totals[key] = self._add_up_anew(settings)
        return self._totals[key]

    def _add_up_anew(self, settings: Settings) -> Memory | None:
        try:
            made = self.plan(settings)
        except (ValueError, ImportError):
            return None
        return made.total if any(item.phase == UPDATE for item in made.memory) else None

    def _can_save(self, name: str, chosen: Settings) -> bool:
        """Return whether a step may save memory; if not, it need not be measured."""
        total = self._add_up(chosen)
        return name not in ONLY_DECODING or total is None or total.phase == DECODING

    def read(self, settings: Settings) -> DiffusionGRPOConfig:
        """Return the settings of the run with `settings` on top of those of the user."""
        words = [*self._overrides, *write_words(settings)]
        return read_run(self._config_file, words, self._launch)[0][2]

    def find(self, most: int) -> list[Choice]:
        """Add the cheapest settings that save something until the run fits or nothing is left."""
        chosen: dict[str, Choice] = {}
        is_changed = True
        while most > self._usable and is_changed:
            is_changed, args = False, self.read(merge([*chosen.values()]))
            for name in STEPS:
                while most > self._usable:
                    proposed = STEPS[name][0](args)
                    if proposed is None or not self._can_save(name, merge([*chosen.values()])):
                        break
                    settings = (chosen[name].settings if name in chosen else {}) | proposed
                    found = self.count(merge([*chosen.values()]) | settings)
                    if found is None or most - found < LEAST_SAVING * most:
                        break
                    chosen.pop(name, None)
                    chosen[name] = Choice(name, settings, cost=STEPS[name][1])
                    most, is_changed, args = found, True, self.read(merge([*chosen.values()]))
        return self._drop_idle([*chosen.values()])

    def _drop_idle(self, choices: list[Choice]) -> list[Choice]:
        """Drop choices that later ones made unnecessary, the most expensive first; note what the others save."""
        order = list(STEPS)
        after = self.count(merge(choices)) if choices else 0
        limit = max(self._usable, after)
        for choice in sorted(choices, key=lambda choice: -order.index(choice.name)):
            rest = [other for other in choices if other is not choice]
            without = self.count(merge(rest))
            if without is not None and without <= limit:
                choices = rest
        after = self.count(merge(choices)) if choices else 0
        for choice in choices:
            without = self.count(merge([other for other in choices if other is not choice]))
            choice.saved = max(0, (without or after) - after)
        return sorted(choices, key=lambda choice: order.index(choice.name))


def write_words(settings: Settings) -> list[str]:
    """Return settings as arguments of the command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", yaml.safe_dump(value).split("\n")[0])]


def fit(
    config_file: str | None,
    overrides: list[str],
    size: int,
    launch: LaunchArguments | None = None,
    built: Built | None = None,
) -> Fit:
    """Find the cheapest settings with which a run fits."""
    usable = count_usable(size)
    search = Search(config_file, overrides, launch, usable, built)
    made = search.plan({})
    if not any(item.phase == UPDATE for item in made.memory):
        raise ValueError(" ".join(["The memory of this run cannot be planned, so nothing is fitted.", *made.notes]))
    choices = search.find(made.total.accelerator)
    after = search.plan(merge(choices)) if choices else made
    return Fit(size, usable, made.total, after.total, choices, after.notes)
