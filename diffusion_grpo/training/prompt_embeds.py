"""Encode the prompts of a run once, before it begins, and free the text encoders' memory (`cache_prompt_embeds`).

Each process encodes its share of the distinct prompts, and sends it to the processes that lack it. The pipeline itself
is called, up to the first call of its network, so that every prompt is encoded as in a rollout. With "disk", later
runs find the results in a folder whose name identifies the text encoders.
"""

import contextlib
import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pyarrow as pa
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HOME
from torch import nn
from tqdm import tqdm

from .. import tiny
from ..config.settings import DiffusionGRPOConfig, describe
from ..data.call_form import call_in_some_form
from ..data.columns import has_transform
from ..data.inputs import Form, PipelineInputs
from ..distributed.collectives import broadcast_bytes, gather_json
from ..distributed.failure import ProcessGroupMonitor
from ..media.serialize import pack_values, unpack_values
from ..policy.base import Policy
from ..policy.denoising import DenoisingPolicy
from ..policy.drivers import UnsupportedPipeline
from ..policy.networks import find_quantization
from ..policy.prompt_cache import KeptResults, PromptCache, check_encode_prompt, hash_tensor
from ..policy.unguided import switch_guidance_off
from .lazy_modules import find_lazy_modules, free_encoders, is_part_of_encoding, is_plain, list_text_encoders
from .model import load_encoder, loads_encoders_late
from .preflight import CheckedRun

logger = logging.getLogger(__name__)

QUANTIZED = ("quantization", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
Read = Callable[[], dict[str, Any]]
Key = tuple[tuple[str, Any], ...]
PLAIN = (str, int, float, bool)
SILENT = 5.0  # seconds before a progress bar appears
PACKET = 64  # prompts sent to other processes at a time


class PromptEmbeds:
    """Encoder of prompts ahead of their use."""

    def __init__(
        self, policy: DenoisingPolicy, inputs: PipelineInputs, kept: KeptResults, monitor: ProcessGroupMonitor
    ):
        self._policy, self._inputs, self._monitor, self._kept = policy, inputs, monitor, kept
        self._forms: dict[Any, Form] = {}  # form in which the pipeline takes a kind of row
        self._counts: dict[Any, int] = {}  # number of calls of encode_prompt for a kind of row
        self._keys: list[tuple[Key, list[str]]] = []  # in this process's share: texts of a row, and its keys
        self._shapes: dict[Key, set[str]] = {}
        self._done: dict[tuple[int, str], Dataset] = {}  # datasets encoded already, by id and overrides
        policy.prompts = PromptCache(kept)
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
            self._done |= {(id(dataset), repr(overrides)): dataset for dataset in datasets}
            args, rows = self._inputs.args, self._list_rows(datasets, prompts)
            shares: dict[Key, int] = {}  # rows with the same texts go to the same process
            self._keys, self._policy.prompts.encoded = [], 0
            is_shown = args.process_index == 0 and not args.disable_tqdm
            for key, read in tqdm(rows, "Encoding prompts", unit="prompt", delay=SILENT, disable=not is_shown):
                texts = tuple((name, value) for name, value in key if isinstance(value, str))
                if shares.setdefault(texts, len(shares) % args.world_size) == args.process_index:
                    kind = tuple((name, type(value) if isinstance(value, str) else value) for name, value in key)
                    self._encode_row((kind, repr(overrides)), read(), overrides)
            logger.info(
                "cache_prompt_embeds: %d distinct prompts, %d of them encoded by this process now; not in memory: %s.",
                len(rows),
                self._policy.prompts.encoded,
                ", ".join(free_encoders(self._policy.pipe)) or "nothing",
            )

    def share(self, accelerator: Accelerator) -> None:
        """Receive from the other processes the results that this one lacks. A collective."""
        with self._monitor.propagate_errors():
            shares = [self._keys]
            if accelerator.num_processes > 1:
                shares = gather_json(accelerator, self._keys)
                self._exchange(accelerator, [[key for _, keys in share for key in keys] for share in shares])
        for text, keys in (row for share in shares for row in share):
            self._shapes.setdefault(tuple(map(tuple, text)), set()).update(map(self._kept.shapes, keys))

    def _exchange(self, accelerator: Accelerator, held: list[list[str]]) -> None:
        """Exchange results so that no process lacks any; `held` are the keys that each has."""
        lacking = [key for key in dict.fromkeys(key for keys in held for key in keys) if key not in self._kept]
        wanted = set().union(*gather_json(accelerator, lacking))
        for process, keys in enumerate(held):
            sent = [key for key in dict.fromkeys(keys) if key in wanted]
            wanted -= set(sent)
            for start in range(0, len(sent), PACKET):
                part, packet = sent[start : start + PACKET], None
                if process == accelerator.process_index:
                    packet = pack_values([self._kept.get(key) for key in part])
                results = unpack_values(broadcast_bytes(accelerator, packet, process))
                for key, result in zip(part, results, strict=True):
                    if key not in self._kept:
                        self._kept.put(key, result, {})

    def _list_rows(self, datasets: list[Dataset], prompts: list[str]) -> list[tuple[Key, Read]]:
        """Return the distinct rows, in the same order on all processes, each with a function that reads it."""
        rows: dict[Key, Read] = {}
        for dataset in datasets:
            for key, index in find_distinct(dataset, self._inputs).items():
                rows.setdefault(key, lambda dataset=dataset, index=index: self._inputs.rows(dataset, [index])[0])
        for prompt in prompts:
            rows.setdefault((("prompt", prompt),), lambda prompt=prompt: {"prompt": prompt})
        return list(rows.items())

    def _encode_row(self, kind: Any, row: dict[str, Any], overrides: dict[str, Any]) -> None:
        """Encode the prompts of one row, and note which results belong to it."""

        def call(form: str) -> list[str]:
            return self._keep(kind, self._inputs.arguments([row], form) | overrides)

        if kind in self._forms:
            keys = call(self._forms[kind].name)
        else:
            keys, self._forms[kind] = call_in_some_form(call)
        self._keys.append((describe_text(row, self._inputs.accepted), keys))

    def _keep(self, kind: Any, arguments: dict[str, Any]) -> list[str]:
        """Encode the prompts of a rollout's call and, for re-noised samples, of an update's call without guidance."""
        policy, args, keys = self._policy, self._inputs.args, []
        unguided = [switch_guidance_off(policy.pipe, policy.networks, arguments)] if args.is_renoised else []
        for number, varied in enumerate([arguments, *unguided]):
            calls = policy.encode_prompts(varied, args.num_inference_steps, self._counts.get((kind, number)))
            policy.prompts.clear()
            if not calls:
                raise UnsupportedPipeline(
                    f"cache_prompt_embeds: {type(policy.pipe).__name__} does not call encode_prompt before its "
                    "network runs; leave cache_prompt_embeds out."
                )
            self._counts[kind, number] = len(calls)
            keys += [key for call in calls for key in call]
        return keys


def find_distinct(dataset: Dataset, inputs: PipelineInputs) -> dict[Key, int]:
    """Return the index of the first row with each set of texts and numbers, and of other columns that hold values."""
    columns, keys = inputs.columns(dataset), []
    if has_transform(dataset):  # the transform decides what a row holds
        for index in range(len(dataset)):
            row = {name: value for name, value in columns.rows([index])[0].items() if name in inputs.accepted}
            keys.append(tuple((k, v if isinstance(v, PLAIN) else v is not None) for k, v in row.items()))
    elif names := [name for name in dataset.column_names if name in inputs.accepted]:
        for batch in columns.dataset.select_columns(names).with_format("arrow").iter(1000):
            values = [_describe(batch[name], name in columns.files) for name in names]
            keys += [tuple(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    first: dict[Key, int] = {}
    for index, key in enumerate(keys or [()] * len(dataset)):
        first.setdefault(key, index)
    return first


def _describe(column: pa.ChunkedArray, is_file: bool) -> list[Any]:
    """Return texts and numbers themselves; of other values, whether there is one."""
    is_plain = pa.types.is_primitive(column.type) or pa.types.is_string(column.type)
    return (column if is_plain and not is_file else column.is_valid()).to_pylist()


def describe_text(row: dict[str, Any], accepted: set[str]) -> Key:
    """Return the texts and numbers of a row; rows with equal ones have equal prompts."""
    return tuple((k, v) for k, v in row.items() if k in accepted and isinstance(v, PLAIN))


def make_prompt_embeds(
    args: DiffusionGRPOConfig, given: CheckedRun, policy: Policy, inputs: PipelineInputs, monitor: ProcessGroupMonitor
) -> PromptEmbeds | None:
    """Make the encoder of a run's prompts, and encode this process's share, if the settings ask for it."""
    if args.cache_prompt_embeds == "off":
        return None
    pipe, is_late = policy.pipe, loads_encoders_late(given.model, args)
    check_encode_prompt(type(pipe))
    if policy.draws_tokens or not any(getattr(pipe, name) for name in list_text_encoders(pipe.components)):
        raise UnsupportedPipeline(
            f"cache_prompt_embeds: {type(pipe).__name__} has no frozen text encoder; leave cache_prompt_embeds out."
        )
    for name, part in find_lazy_modules(pipe).items():
        part.connect(
            functools.partial(load_encoder, given.model, args, given.is_full_training, given.quantized, pipe, name)
        )
    kept = KeptResults()
    if args.cache_prompt_embeds == "disk":
        folder = Path(args.prompt_embeds_dir or Path(HF_HOME) / "diffusion_grpo" / "prompt_embeds")
        kept = KeptResults(folder / identify_encoders(pipe, given.model if is_late else None, args))
    embeds = PromptEmbeds(policy, inputs, kept, monitor)
    # the network moves to the accelerator later, which may have no room for both
    with quantized_networks_on_cpu(policy.networks, args.device):
        _move_frozen(pipe, policy, args.device)
        embeds.encode([dataset for _, dataset in given.datasets], args.validation_prompts or [])
    return embeds


@contextlib.contextmanager
def quantized_networks_on_cpu(networks: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Keep networks that bitsandbytes loaded onto the accelerator in 4 bits in CPU memory inside this context."""
    moved = [each for each in networks if find_quantization(each) == "bitsandbytes_4bit" and each.device.type != "cpu"]
    try:
        for network in moved:
            network.to("cpu")
        if moved and torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield
    finally:
        for network in moved:
            network.to(device)


def _move_frozen(pipe: DiffusionPipeline, policy: Policy, device: torch.device) -> None:
    """Move frozen parts to the accelerator: text encoders, and what encodes an image before them."""
    for part in pipe.components.values():
        is_frozen = isinstance(part, nn.Module) and not any(part is network for network in policy.networks)
        if is_frozen and is_plain(part):
            part.to(device)


# Identity of a model


def identify_encoders(pipe: DiffusionPipeline, model: str | None, args: DiffusionGRPOConfig) -> str:
    """Return the name of the folder for prompts encoded by these text encoders, devices and versions."""
    if model is None:
        identity = identify_pipeline(pipe)
    else:
        kwargs = args.model_init_kwargs or {}
        source = str(tiny.PATH) if model == "tiny" else model
        quantized = [getattr(args, name) for name in QUANTIZED]
        identity = f"{identify_source(source, **kwargs)} {describe(kwargs)} {quantized}"
    dtypes = [str(getattr(pipe, name).dtype) for name in list_text_encoders(pipe.components) if getattr(pipe, name)]
    versions = [module.__version__ for module in (torch, transformers, diffusers)]
    name = type(pipe).__name__
    return f"{name}-{_hash_all([name, identity, *dtypes, args.device.type, *versions])[:20]}"


def identify_pipeline(pipe: DiffusionPipeline) -> str:
    """Return a hash that identifies the text encoders and tokenizers of a pipeline by their contents."""
    contents = []
    for name, part in pipe.components.items():
        if not is_part_of_encoding(name):
            continue
        contents.append(name)
        if isinstance(part, nn.Module):
            contents += [f"{key} {hash_tensor(value)}" for key, value in part.state_dict().items()]
        elif hasattr(part, "save_pretrained"):
            with tempfile.TemporaryDirectory() as folder:
                part.save_pretrained(folder)
                contents += [path.read_bytes().hex() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return _hash_all(contents)


def identify_source(source: str | Path, **kwargs: Any) -> str:
    """Return a string that identifies a named model's text encoders by its revision, or its files' sizes and times."""
    folder = Path(source)
    if not folder.is_dir():
        names = {name: kwargs[name] for name in ("cache_dir", "revision") if name in kwargs}
        path = try_to_load_from_cache(str(source), "model_index.json", **names)
        return f"{source}@{Path(path).parent.name if isinstance(path, str) else kwargs.get('revision')}"
    files = [path for path in sorted(folder.glob("*/**/*")) if path.is_file()]
    names = [str(path.relative_to(folder)) for path in files]
    return _hash_all(
        f"{name} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for name, path in zip(names, files, strict=True)
        if is_part_of_encoding(Path(name).parts[0])
    )


def _hash_all(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
