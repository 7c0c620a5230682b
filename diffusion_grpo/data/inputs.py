"""Keyword arguments of one pipeline call, and which samples share one.

In: settings and dataset rows. Out: what the pipeline's `__call__` gets, the same for the same rows in rollout, replay
and evaluation. Which columns a pipeline takes is read off its signature; whether it takes several samples in one call
is asked of the pipeline (`batching.py`); samples of different shapes never share one.
"""

import inspect
import logging
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline

from ..config.checks import RESERVED
from ..config.settings import DiffusionGRPOConfig
from ..distributed.collectives import broadcast_bytes, gather_json
from ..media.serialize import pack_samples, unpack_samples
from ..policy.batching import BATCHED, SINGLE, Form, find_form
from ..policy.rollout import Policy, UnsupportedPipeline
from ..rewards.contract import Reward, list_columns
from .calls import groups_by_shape, pipeline_inputs, texts_of_embeddings
from .columns import Columns, is_media
from .prompts import EMBEDDED

FROM_CONFIG = ("guidance_scale", "height", "width", "num_frames")
logger = logging.getLogger(__name__)


class PipelineInputs:
    """Builds the keyword arguments of a pipeline call from dataset rows.

    Args:
        pipe: the pipeline, or its class.
        args: its `guidance_scale`, `height`, `width`, `num_frames` and `pipeline_kwargs` go into every call.

    Raises:
        ValueError: a setting that the pipeline's `__call__` does not take, with the list of what it does.
    """

    def __init__(self, pipe: DiffusionPipeline | type[DiffusionPipeline], args: DiffusionGRPOConfig):
        self.args = args
        self.pipeline = pipe if isinstance(pipe, type) else type(pipe)
        parameters = inspect.signature(self.pipeline.__call__).parameters
        self.parameters = {k: v for k, v in parameters.items() if k not in {"self", *RESERVED}}
        self.accepted = set(self.parameters)
        self.fixed = {name: getattr(args, name) for name in FROM_CONFIG if getattr(args, name) is not None}
        self.fixed |= args.pipeline_kwargs or {}
        unknown = sorted(set(self.fixed) - self.accepted)
        if unknown:
            raise ValueError(
                f"{self.pipeline.__name__} does not take {', '.join(unknown)} from the settings; it takes "
                f"{', '.join(sorted(self.accepted))}."
            )
        self._columns: dict[int, tuple[Dataset, Columns]] = {}
        self.forms: dict[frozenset[str], Form] = {}  # by the columns that are given

    def __call__(self, rows: list[dict[str, Any]], **overrides: Any) -> dict[str, Any]:
        """The keyword arguments for these rows; columns win over settings, `overrides` over both."""
        form = self.forms.get(self._given(rows[0]), Form(BATCHED))
        return self._arguments(rows, form.name) | overrides

    def _arguments(self, rows: list[dict[str, Any]], form: str) -> dict[str, Any]:
        replaced = texts_of_embeddings(rows[0], self.accepted)
        fixed = {name: value for name, value in self.fixed.items() if name not in replaced}
        if form != SINGLE:  # a negative prompt beside a list of prompts: one a sample, as not all pipelines spread it
            texts = {name: value for name, value in fixed.items() if isinstance(value, str) and "prompt" in name}
            fixed = fixed | {name: [value] * len(rows) for name, value in texts.items()}
        return {**fixed, **pipeline_inputs(rows, self.accepted, is_bare=form == SINGLE)}

    def _given(self, row: dict[str, Any]) -> frozenset[str]:
        return frozenset(name for name in self.accepted & row.keys() if row[name] is not None)

    def columns(self, dataset: Dataset) -> Columns:
        """Which of a dataset's columns hold files, and how its rows are read."""
        if id(dataset) not in self._columns:
            self._columns[id(dataset)] = dataset, Columns(dataset, self.parameters)
        return self._columns[id(dataset)][1]

    def rows(self, dataset: Dataset, indices: list[int]) -> list[dict[str, Any]]:
        """Rows of the dataset with their files decoded; see [`~diffusion_grpo.data.columns.Columns.rows`]."""
        return self.columns(dataset).rows(indices)

    def check(self, dataset: Dataset, name: str, asked: set[str]) -> None:
        """Refuses a dataset whose files cannot be read; warns of pictures, videos and sound that nobody takes.

        Args:
            dataset: the user's.
            name: what it was given as, for the message.
            asked: columns that rewards name.

        Raises:
            ValueError: see [`~diffusion_grpo.data.columns.Columns.check`].
        """
        if "prompt" not in dataset.column_names and EMBEDDED not in self.accepted:
            raise ValueError(
                f"{name} has no column 'prompt', and {self.pipeline.__name__} takes no {EMBEDDED}; add the prompts."
            )
        self.columns(dataset).check(name)
        idle = [c for c, f in dataset.features.items() if is_media(f) and c not in self.accepted | asked]
        if idle:
            logger.warning(
                "%s: %s does not take %s, and no reward names it; the pipeline takes %s. Rename the column if it is "
                "meant to be an input.",
                name,
                self.pipeline.__name__,
                ", ".join(idle),
                ", ".join(sorted(self.accepted)),
            )

    def learn(
        self,
        policy: Policy,
        rows: list[dict[str, Any]],
        noise_level: float,
        args: DiffusionGRPOConfig | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Finds out, once for each set of columns, whether samples share a call; `parts` and `__call__` follow it.

        Args:
            policy: of the pipeline.
            rows: of the dataset, decoded.
            noise_level: of its process.
            args: the training's sizes and steps, where the constructor was given other settings.
            accelerator: of processes that pass the network together. All ask about the same rows then, which is a
                collective: each set of columns that one of them has to ask about, by the row that one has.

        Raises:
            Exception: what the pipeline raised, where it takes the rows in no form.
        """
        if policy.draws_tokens:  # who writes tokens takes a list of prompts
            return
        args = args or self.args
        asked: dict[frozenset[str], dict[str, Any]] = {}
        for row in rows:
            given = self._given(row)
            if given not in self.forms:
                asked.setdefault(given, {name: row[name] for name in row if name in given})
        for given, row in (asked if accelerator is None else _asked_by_all(asked, accelerator)).items():
            self.forms[given] = self._form(policy, row, noise_level, args)

    def _form(self, policy: Policy, row: dict[str, Any], noise_level: float, args: DiffusionGRPOConfig) -> Form:
        """Asks the pipeline by one row; warns where it takes samples one by one."""
        count = args.rollout_batch_size or args.per_device_train_batch_size
        start, stop = args.window
        form = find_form(
            policy,
            row,
            self._arguments,
            count,
            num_inference_steps=args.num_inference_steps,
            steps=list(range(start, min(start + 2, stop))),
            noise_level=noise_level,
        )
        if form.reason is not None and count > 1:
            logger.warning(
                "%s does not take several samples in one call (%s); they are rolled out and replayed one by one.",
                self.pipeline.__name__,
                form.reason,
            )
        return form

    def parts(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Positions of the rows that share a call: equal in all numbers and shapes; or each row for itself."""
        parts = []
        for part in groups_by_shape(rows, self.accepted):
            is_batched = self.forms.get(self._given(rows[part[0]]), Form(BATCHED)).name == BATCHED
            parts += [part] if is_batched else [[place] for place in part]
        return parts

    def calls(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Places of the samples of each pipeline call of a rollout, cut as the updates cut it; `rows` are one a
        sample."""
        size = self.args.rollout_batch_size or self.args.per_device_train_batch_size
        starts = range(0, len(rows), size)
        return [[start + i for i in places] for start in starts for places in self.parts(rows[start : start + size])]


def _asked_by_all(
    own: dict[frozenset[str], dict[str, Any]], accelerator: Accelerator
) -> dict[frozenset[str], dict[str, Any]]:
    """A row for each set of columns that some process asks about, in the same order on all; a collective.

    It is the first such process' row, as it has decoded it.
    """
    found: dict[frozenset[str], dict[str, Any]] = {}
    for process, asked in enumerate(gather_json(accelerator, [sorted(given) for given in own])):
        for given in map(frozenset, asked):
            if given not in found:
                packet = pack_samples([own[given]], None) if process == accelerator.process_index else None
                (found[given],), _ = unpack_samples(broadcast_bytes(accelerator, packet, process), torch.device("cpu"))
    return found


def checked_inputs(
    pipe: type[DiffusionPipeline],
    args: DiffusionGRPOConfig,
    named: list[tuple[str, Dataset]],
    rewards: list[Reward],
) -> PipelineInputs:
    """The inputs of a pipeline class, with settings and datasets checked against it; see `PipelineInputs`."""
    inputs = PipelineInputs(pipe, args)
    asked = set().union(*map(list_columns, rewards))
    for name, dataset in named:
        inputs.check(dataset, name, asked)
    return inputs


def check_count(samples: Any, count: int, pipe: DiffusionPipeline) -> None:
    """Refuses the output of a call that holds another number of samples than were asked for.

    Raises:
        UnsupportedPipeline: such an output.
    """
    if len(samples) != count:
        raise UnsupportedPipeline(
            f"{type(pipe).__name__} returned {len(samples)} samples where {count} were asked for; it reads its inputs "
            "in another way than one value a sample."
        )
