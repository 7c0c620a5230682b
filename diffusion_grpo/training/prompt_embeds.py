"""Encode the prompts of a run once, before it begins, and free the text encoders' memory (`cache_prompt_embeds`).

Each process encodes its share of the distinct prompts, and sends it to the processes that lack it. The pipeline itself
is called, up to the first call of its network, so that every prompt is encoded as in a rollout.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline
from huggingface_hub.constants import HF_HOME
from torch import nn
from tqdm import tqdm

from ..config.settings import DiffusionGRPOConfig
from ..data.calls import BATCHED, LISTED, SINGLE
from ..data.distinct import Key, describe_text, find_distinct
from ..data.inputs import PipelineInputs
from ..distributed.collectives import broadcast_bytes, gather_json
from ..distributed.failure import ProcessGroupMonitor
from ..media.serialize import pack_samples, unpack_samples
from ..policy.base import Policy
from ..policy.denoising import DenoisingPolicy
from ..policy.drivers import UnsupportedPipeline
from ..policy.prompt_calls import check_encode_prompt
from ..policy.prompt_store import DiskShelf, MemoryShelf, PromptStore
from ..policy.quantized import find_quantization
from ..policy.unguided import switch_guidance_off
from .model import load_encoder, loads_encoders_late
from .preflight import CheckedRun
from .text_encoders import TextEncoders, identify_encoders, is_plain

logger = logging.getLogger(__name__)

Read = Callable[[], dict[str, Any]]
SILENT = 5.0  # seconds before a progress bar appears
PACKET = 64  # prompts sent to other processes at a time


class PromptEmbeds:
    """Encoder of prompts ahead of their use."""

    def __init__(
        self,
        *,
        policy: DenoisingPolicy,
        inputs: PipelineInputs,
        encoders: TextEncoders,
        store: PromptStore,
        monitor: ProcessGroupMonitor,
        process: int,
        processes: int,
        num_inference_steps: int,
        vary: Callable[[dict[str, Any]], list[dict[str, Any]]],
        shows_progress: bool = False,
    ):
        self.encoders, self.store, self._monitor = encoders, store, monitor
        self._policy, self._inputs, self._vary = policy, inputs, vary
        self._shows_progress = shows_progress
        self._process, self._processes, self._steps = process, processes, num_inference_steps
        self._forms: dict[Any, str] = {}  # form in which the pipeline takes a kind of row
        self._counts: dict[Any, int] = {}  # number of calls of encode_prompt for a kind of row
        self._found: list[tuple[Key, list[str]]] = []  # in this process's share: texts of a row, and its keys
        self._shapes: dict[Key, set[str]] = {}
        self._total = 0
        self._done: dict[tuple[int, str], Dataset] = {}  # datasets encoded already, by id and overrides
        policy.prompts = store
        inputs.describe_prompt = self.describe_shapes

    def describe_shapes(self, row: dict[str, Any]) -> Any:
        """Return the shapes of a row's embeddings, which the prompts of one call must have in common."""
        return tuple(sorted(self._shapes.get(describe_text(row, self._inputs.accepted), ())))

    def prepare(self, accelerator: Accelerator, datasets: list[Dataset], prompts: list[str], **overrides: Any) -> None:
        """Encode and share what is still missing of some datasets and prompts. A collective."""
        datasets = [dataset for dataset in datasets if (id(dataset), repr(overrides)) not in self._done]
        if datasets or prompts:
            self.encode(datasets, prompts, **overrides)
            self.share(accelerator)

    def encode(self, datasets: list[Dataset], prompts: list[str], **overrides: Any) -> None:
        """Encode this process's share, and wait until all processes have encoded theirs."""
        with self._monitor.barrier_after("encodes prompts"):
            self._encode_share(datasets, prompts, overrides)

    def _encode_share(self, datasets: list[Dataset], prompts: list[str], overrides: dict[str, Any]) -> None:
        self._done |= {(id(dataset), repr(overrides)): dataset for dataset in datasets}
        rows = self._list_rows(datasets, prompts)
        shares: dict[Key, int] = {}  # rows with the same texts go to the same process
        seen: set[Any] = set()
        self._found, self._total = [], len(rows)
        self.store.encoded = 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.encoders.working())
            stack.callback(self.store.rest)
            bar = tqdm(rows, desc="Encoding prompts", unit="prompt", delay=SILENT, disable=not self._shows_progress)
            for key, read in bar:
                texts = tuple((name, value) for name, value in key if isinstance(value, str))
                is_own = shares.setdefault(texts, len(shares) % self._processes) == self._process
                kind = tuple((name, type(value) if isinstance(value, str) else value) for name, value in key)
                is_new, _ = kind not in seen, seen.add(kind)
                if is_own:
                    self.store.learns_layouts = is_new
                    self._encode_row((kind, repr(overrides)), read(), overrides)

    def share(self, accelerator: Accelerator) -> None:
        """Receive from the other processes the results that this one lacks. A collective."""
        with self._monitor.propagate_errors():
            self._share(accelerator)

    def _share(self, accelerator: Accelerator) -> None:
        own = [[text, keys] for text, keys in self._found]
        shapes = {key: self.store.shapes(key) for _, keys in self._found for key in keys}
        layouts = [f"layout-{kind}" for kind in self.store.layouts]
        every = [[own, shapes, layouts]]
        if accelerator.num_processes > 1:
            every = gather_json(accelerator, every[0])
            self._exchange(accelerator, [[*shapes, *layouts] for _, shapes, layouts in every])
        for found, shapes, _ in every:
            for text, keys in found:
                known = self._shapes.setdefault(tuple(map(tuple, text)), set())
                known.update(shapes[key] for key in keys)
        logger.info(
            "cache_prompt_embeds: %d distinct prompts, %d of them encoded by this process now; not in memory: %s.",
            self._total,
            self.store.encoded,
            ", ".join(self.encoders.released) or "nothing",
        )

    def _exchange(self, accelerator: Accelerator, held: list[list[str]]) -> None:
        """Exchange results so that no process lacks any."""
        lacking = [key for key in dict.fromkeys(key for keys in held for key in keys) if key not in self.store.shelf]
        wanted = set().union(*gather_json(accelerator, lacking))
        for process, keys in enumerate(held):
            sent = [key for key in keys if key in wanted]
            wanted -= set(sent)
            for start in range(0, len(sent), PACKET):
                part, packet = sent[start : start + PACKET], None
                if process == self._process:
                    packet = pack_samples([self.store.shelf.get(key) for key in part], None)
                results, _ = unpack_samples(broadcast_bytes(accelerator, packet, process), torch.device("cpu"))
                for key, result in zip(part, results, strict=True):
                    if key not in self.store.shelf:
                        self.store.shelf.put(key, result, {})

    def _list_rows(self, datasets: list[Dataset], prompts: list[str]) -> list[tuple[Key, Read]]:
        """Return the distinct rows, in the same order on all processes, each with a function that reads it."""
        found: dict[Key, Read] = {}
        for dataset in datasets:
            for key, index in find_distinct(dataset, self._inputs).items():
                found.setdefault(key, lambda dataset=dataset, index=index: self._inputs.rows(dataset, [index])[0])
        for prompt in prompts:
            found.setdefault((("prompt", prompt),), lambda prompt=prompt: {"prompt": prompt})
        return list(found.items())

    def _encode_row(self, kind: Any, row: dict[str, Any], overrides: dict[str, Any]) -> None:
        """Encode the prompts of one row, and note which results belong to it."""
        self.store.noted.clear()
        forms = [self._forms[kind]] if kind in self._forms else [BATCHED, SINGLE, LISTED]
        errors: list[Exception] = []
        for form in forms:
            try:
                self._call(kind, self._inputs.arguments([row], form) | overrides)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # any error of the pipeline: it may accept another form
                errors.append(error)
            else:
                self._forms[kind] = form
                self._found.append((describe_text(row, self._inputs.accepted), list(dict.fromkeys(self.store.noted))))
                return
        raise next((error for error in errors if isinstance(error, UnsupportedPipeline)), errors[0])

    def _call(self, kind: Any, arguments: dict[str, Any]) -> None:
        for number, varied in enumerate(self._vary(arguments)):
            known = self._counts.get((kind, number))
            self.store.is_ahead = known is not None  # the first call of a kind runs with real results
            made = self._policy.encode_prompts(varied, self._steps, known)
            self.store.clear()
            if made == 0:
                raise UnsupportedPipeline(
                    f"cache_prompt_embeds: {type(self._policy.pipe).__name__} does not call encode_prompt before its "
                    "network runs; leave cache_prompt_embeds out."
                )
            self._counts[kind, number] = made


def make_prompt_embeds(
    args: DiffusionGRPOConfig,
    given: CheckedRun,
    policy: Policy,
    inputs: PipelineInputs,
    monitor: ProcessGroupMonitor,
) -> PromptEmbeds | None:
    """Make the encoder of a run's prompts, and encode this process's share, if the settings ask for it.

    This happens before the network moves to the accelerator, which may have no room for both. A network that is there
    already, because bitsandbytes quantised it, is kept in CPU memory meanwhile.
    """
    if args.cache_prompt_embeds == "off":
        return None
    pipe, is_late = policy.pipe, loads_encoders_late(given.model, args)
    check_encode_prompt(type(pipe))
    folder = Path(args.prompt_embeds_dir or Path(HF_HOME) / "diffusion_grpo" / "prompt_embeds")
    source = (given.model, args, given.is_full_training, given.quantized, pipe)
    reload = functools.partial(load_encoder, *source) if is_late else None
    encoders = TextEncoders(pipe, reload, folder, args.device)
    if policy.draws_tokens or not encoders.names:
        raise UnsupportedPipeline(
            f"cache_prompt_embeds: {type(pipe).__name__} has no frozen text encoder; leave cache_prompt_embeds out."
        )
    shelf = MemoryShelf()
    if args.cache_prompt_embeds == "disk":
        shelf = DiskShelf(folder / identify_encoders(pipe, given.model if is_late else None, args))
    embeds = PromptEmbeds(
        policy=policy,
        inputs=inputs,
        encoders=encoders,
        store=PromptStore(shelf, encoders.watch),
        monitor=monitor,
        process=args.process_index,
        processes=args.world_size,
        num_inference_steps=args.num_inference_steps,
        vary=functools.partial(_list_calls, policy, args.is_renoised),
        shows_progress=args.process_index == 0 and not args.disable_tqdm,
    )
    with quantized_networks_on_cpu(policy.networks, args.device):
        _move_beside(pipe, policy, encoders, args.device)
        embeds.encode([dataset for _, dataset in given.datasets], args.validation_prompts or [])
    return embeds


@contextlib.contextmanager
def quantized_networks_on_cpu(networks: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Keep networks that bitsandbytes loaded onto the accelerator in CPU memory inside this context."""
    moved = [
        network
        for network in networks
        if (find_quantization(network) or "").startswith("bitsandbytes") and network.device.type != "cpu"
    ]
    try:
        for network in moved:
            _move_quantized(network, "cpu")
        if moved and torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield
    finally:
        for network in moved:
            _move_quantized(network, device)


def _move_quantized(network: nn.Module, device: torch.device | str) -> None:
    """Move a network that bitsandbytes quantised, with the tensors of its 8-bit layers that are no parameters."""
    network.to(device)
    for module in network.modules():
        for holder in (getattr(module, "weight", None), getattr(module, "state", None)):
            if getattr(holder, "CB", None) is not None:  # the weight again, which `to` does not move
                holder.CB = module.weight.data
            if getattr(holder, "SCB", None) is not None:  # its scales
                holder.SCB = holder.SCB.to(device)


def _move_beside(pipe: DiffusionPipeline, policy: Policy, encoders: TextEncoders, device: torch.device) -> None:
    """Move frozen parts to the text encoders' device: an image may be encoded before the prompt is."""
    for name, part in pipe.components.items():
        is_frozen = isinstance(part, nn.Module) and not any(part is network for network in policy.networks)
        if is_frozen and name not in encoders.names and is_plain(part):
            part.to(device)


def _list_calls(policy: Policy, is_renoised: bool, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of a rollout's call and, for re-noised samples, of an update's call without guidance."""
    unguided = [switch_guidance_off(policy.pipe, policy.networks, arguments)] if is_renoised else []
    return [arguments, *unguided]
