"""`PipelineInputs`: what one pipeline accepts, checked against settings and datasets, and the calls it gets for rows.

Equal rows give equal arguments in rollout, replay and evaluation, which leaves out `sigmas`. The pipeline's signature
says which columns it takes; a trial call (`call_form.py`), whether it takes several samples at once. Samples of
different shapes share none. The videos' frame rate and a check of the samples that a call returns are here too.
"""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from PIL import Image

from ..config.settings import DiffusionGRPOConfig
from ..policy.drivers import UnsupportedPipeline
from ..rewards.contract import PROVIDED, VARIADIC, Reward, list_columns
from .columns import Columns, fit_images, list_given
from .embeddings import check_embeddings, find_replaced_texts, is_embedding

logger = logging.getLogger(__name__)
BATCHED, SINGLE, LISTED = "batched", "single", "listed"
FROM_CONFIG = ("guidance_scale", "height", "width", "num_frames")
SAMPLE_COUNTS = {"num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"}
SET_BY_TRAINER = {"num_inference_steps", "generator", "output_type", "return_dict", "latents", "timesteps", "sigmas"}
RESERVED = SET_BY_TRAINER | SAMPLE_COUNTS  # arguments of a pipeline's call that the user must not give
RATES = ("frame_rate", "fps")  # names in diffusers for the frames per second of the videos
FPS = 16.0  # of pipelines without such a parameter
NUMBERS_OF_SAMPLES = ("class_labels",)  # one per sample, like prompts; other numbers are one per call


@dataclasses.dataclass
class Form:
    """The form in which the inputs of a call are given."""

    name: str
    reason: str | None = None  # why not all samples of a call are given at once


class PipelineInputs:
    """Builds the keyword arguments of a pipeline call from dataset rows."""

    def __init__(
        self, pipe: DiffusionPipeline | type[DiffusionPipeline], args: DiffusionGRPOConfig, asked: Collection[str] = ()
    ):
        self.args, self._asked = args, frozenset(asked)
        self.pipeline = pipe if isinstance(pipe, type) else type(pipe)
        parameters = inspect.signature(self.pipeline.__call__).parameters
        self._reserved = RESERVED & parameters.keys()
        self.parameters = {name: value for name, value in parameters.items() if name not in {"self", *RESERVED}}
        self.accepted = set(self.parameters)
        self.fixed = {name: getattr(args, name) for name in FROM_CONFIG if getattr(args, name) is not None}
        self.check_arguments(self.fixed, "settings")
        self.check_arguments(args.pipeline_kwargs or {})
        self._columns: dict[int, tuple[Dataset, Columns]] = {}
        self.fit_images(None if isinstance(pipe, type) else pipe)
        steps = args.num_inference_steps
        sigmas = [1 - step / steps for step in range(steps)] if args.sigmas == "even" else args.sigmas
        self.spacing = {} if sigmas is None else {"sigmas": list(sigmas)}
        if self.spacing and "sigmas" not in parameters:
            raise ValueError(
                f"sigmas: {self.pipeline.__name__} spaces its steps itself and takes no sigmas; leave them out."
            )
        self.fps = self._find_fps()
        self._is_size_told = False
        self.forms: dict[frozenset[str], Form] = {}  # by the names of the columns that a row has
        self.draws_globally = False  # whether the trial calls drew from torch's global generator
        self.describe_prompt: Callable[[dict[str, Any]], Any] | None = None  # what prompts of a call share

    def fit_images(self, pipe: DiffusionPipeline | None) -> None:
        """Convert images to the mode that a loaded pipeline takes; without one they stay as they are."""
        config = getattr(getattr(pipe, "vae", None), "config", {})  # with four channels it encodes layers
        has_alpha = config.get("input_channels", config.get("in_channels")) == 4
        self._image_mode = None if pipe is None else "RGBA" if has_alpha else "RGB"
        self._columns.clear()
        for name, value in (self.args.pipeline_kwargs or {}).items():
            self.fixed[name] = fit_images(value, None if "mask" in name else self._image_mode)
        self.repeated = {k: v for k, v in self.fixed.items() if _is_per_sample(k, v)}

    def _find_fps(self) -> float:
        """Return the frames per second; some pipelines also take them as an argument, for sound or as a condition."""
        given = self.args.fps
        for name in RATES:
            if name in self.parameters:
                made = self.fixed.get(name, self.parameters[name].default)
                if not isinstance(made, (int, float)):
                    continue
                if given is not None and given != made:
                    raise ValueError(
                        f"fps={given:g}, but {self.pipeline.__name__} makes videos of {name}={made:g}; set "
                        f"pipeline_kwargs: {{{name}: {given:g}}} as well, or leave fps out."
                    )
                return float(made)
        return FPS if given is None else given

    def __call__(self, rows: list[dict[str, Any]], **overrides: Any) -> dict[str, Any]:
        """Return the keyword arguments for these rows; columns win over settings, `overrides` over both."""
        form = self.forms.get(self.find_given(rows[0]), Form(BATCHED))
        return self.arguments(rows, form.name) | overrides

    def arguments(self, rows: list[dict[str, Any]], form: str) -> dict[str, Any]:
        """Return the keyword arguments for these rows in one form; see `Form`."""
        replaced = find_replaced_texts(self.find_given(rows[0]))
        fixed = {name: value for name, value in self.fixed.items() if name not in replaced | self.repeated.keys()}
        # not every pipeline repeats a single text, and some draw noise for a single image once for the whole call
        rows = [row | {k: v for k, v in self.repeated.items() if row.get(k) is None} for row in rows]
        # a text that is not None by default would be passed together with the embeddings
        unset = {name: None for name in replaced & self.accepted if self.parameters[name].default is not None}
        return {**fixed, **self.spacing, **unset, **build_arguments(rows, self.accepted - replaced, form == SINGLE)}

    def check_arguments(self, arguments: dict[str, Any], setting: str = "pipeline_kwargs") -> None:
        """Refuse arguments that the trainer sets, that the pipeline does not take, or that list texts."""
        for name, value in arguments.items():
            if reason := explain_reserved(name):
                raise ValueError(f"{setting}: {reason}; leave it out.")
            if name not in self.accepted:
                raise ValueError(
                    f"{setting}: {self.pipeline.__name__} does not take {name}; it takes "
                    f"{', '.join(sorted(self.accepted))}."
                )
            if "prompt" in name and isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value):
                raise ValueError(
                    f"{setting}: {name} is a list of texts, but it applies to every prompt of the run; give one "
                    f"text, or add a column {name!r} with one text per prompt."
                )

    def find_given(self, row: dict[str, Any]) -> frozenset[str]:
        """Return the names of the pipeline's inputs that a row holds; `forms` has a form for each such set."""
        return frozenset(name for name in self.accepted & row.keys() if row[name] is not None)

    def has_new(self, rows: list[dict[str, Any]]) -> bool:
        """Return whether the form of some rows is not known yet."""
        return any(self.find_given(row) not in self.forms for row in rows)

    def columns(self, dataset: Dataset) -> Columns:
        if id(dataset) not in self._columns:
            self._columns[id(dataset)] = dataset, Columns(dataset, self.parameters, self._image_mode)
        return self._columns[id(dataset)][1]

    def rows(self, dataset: Dataset, indices: list[int]) -> list[dict[str, Any]]:
        """Return rows of the dataset with their files decoded; see [`~diffusion_grpo.data.columns.Columns.rows`]."""
        return self.columns(dataset).rows(indices)

    def find_images(self, row: dict[str, Any]) -> list[Image.Image]:
        """Return the images of a row that the pipeline takes, masks last; of a video, its first frame."""
        shown: list[Image.Image] = []
        for name in sorted(self.parameters, key=lambda name: "mask" in name):  # otherwise in their order
            value = row.get(name)
            items = value if isinstance(value, list) else [value]
            images = [item for item in items if isinstance(item, Image.Image)]
            shown += images[:1] if "video" in name else images
        return shown

    def check_samples(self, samples: Any, count: int, arguments: Mapping[str, Any]) -> None:
        """Refuse the wrong number of samples of a call; warn once if they do not have the size that was asked for."""
        name = self.pipeline.__name__
        if len(samples) != count:
            raise UnsupportedPipeline(
                f"{name} returned {len(samples)} samples where {count} were asked for; it does not read its "
                "inputs as one value per sample."
            )
        made = _measure(samples[0])
        given = {key: value for key, value in arguments.items() if key in made and isinstance(value, int)}
        other = {key: value for key, value in given.items() if value != made[key]}
        if other and not self._is_size_told:
            self._is_size_told = True
            logger.warning(
                "%s makes samples of %s, although %s was asked for%s.",
                name,
                ", ".join(f"{key}={value}" for key, value in made.items()),
                ", ".join(f"{key}={value}" for key, value in other.items()),
                "; it has max_area (pixels), which goes into pipeline_kwargs" if "max_area" in self.accepted else "",
            )

    def check(self, dataset: Dataset, name: str) -> None:
        """Refuse a dataset whose files cannot be read; warn of images, videos and sound that nothing takes."""
        if "prompt" not in dataset.column_names and not any(map(is_embedding, self.accepted)):
            raise ValueError(
                f"{name} has no column 'prompt', and {self.pipeline.__name__} takes no prompt_embeds; add the prompts."
            )
        check_embeddings(dataset, self.accepted, name)
        given = list_given(dataset)
        if missing := self.find_missing(given):
            raise ValueError(
                f"{name} has no column {missing[0]!r}, and {self.pipeline.__name__} cannot be called without it; add "
                f"the column, or rename the one that holds it (there are {', '.join(given)})."
            )
        self.check_columns(dataset, name)
        for column in sorted(self._reserved.intersection(given) - self._asked):
            logger.warning("%s: the pipeline does not get the column %r: %s.", name, column, explain_reserved(column))
        media = self.columns(dataset).list_media()
        videos = [column for column in media if column in self.accepted and "video" in column]
        if videos and self.args.fps is None and not any(rate in self.parameters for rate in RATES):
            logger.warning(
                "%s: fps is not set, so the videos that are made from the column %r are saved and scored at %g frames "
                "per second; set fps to the rate of the column's videos.",
                name,
                videos[0],
                self.fps,
            )
        idle = [column for column in media if column not in self.accepted | self._asked]
        if idle:
            logger.warning(
                "%s: %s does not take %s, and no reward names it; the pipeline takes %s. Rename the column if it is "
                "meant to be an input.",
                name,
                self.pipeline.__name__,
                ", ".join(idle),
                ", ".join(sorted(self.accepted)),
            )

    def find_missing(self, given: Collection[str]) -> list[str]:
        """Return the arguments without a default that neither the settings nor the `given` columns set."""
        return find_missing(self.parameters, {*given, *self.fixed})

    def check_columns(self, dataset: Dataset, name: str) -> None:
        """Refuse a column of frame rates, and files that cannot be read."""
        for column in list_given(dataset):
            if column in RATES and column in self.accepted:
                raise ValueError(
                    f"{name}, column {column!r}: all videos of a run have the same frames per second; set "
                    f"pipeline_kwargs: {{{column}: ...}}, and remove or rename the column."
                )
        self.columns(dataset).check(name)

    def parts(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Return the indices of the rows of each call: rows with equal numbers and shapes, or single rows."""
        parts = []
        for part in group_by_shape(rows, self.accepted, self.describe_prompt):
            is_batched = self.forms.get(self.find_given(rows[part[0]]), Form(BATCHED)).name == BATCHED
            parts += [part] if is_batched else [[index] for index in part]
        return parts

    def calls(self, rows: list[dict[str, Any]], size: int) -> list[list[int]]:
        """Return the indices of the samples of each call, at most `size` in each."""
        starts = range(0, len(rows), size)
        return [[start + i for i in indices] for start in starts for indices in self.parts(rows[start : start + size])]


def build_arguments(rows: list[dict[str, Any]], accepted: set[str], is_bare: bool = False) -> dict[str, Any]:
    """Build the arguments of one pipeline call from rows: a number, a tensor (batch, ...) or a list per column."""
    inputs = {}
    for name in rows[0]:
        if name not in accepted:
            continue
        values = [row[name] for row in rows]
        is_setting = name not in NUMBERS_OF_SAMPLES and all(isinstance(value, bool | int | float) for value in values)
        missing = sum(value is None for value in values)
        if missing == len(values):
            continue
        if missing:
            raise ValueError(
                f"The column '{name}' is None in {missing} of the {len(values)} rows of one pipeline call; give it a "
                "value in all rows or in none."
            )
        if not is_setting:
            if is_bare:
                inputs[name] = values[0]
            elif all(torch.is_tensor(value) for value in values):
                inputs[name] = torch.stack(values)
            else:
                inputs[name] = np.stack(values) if all(isinstance(value, np.ndarray) for value in values) else values
            continue
        if len(set(values)) > 1:
            raise ValueError(
                f"The column '{name}' has different values in one pipeline call, {sorted(set(values))}, but a "
                "pipeline takes one; give all rows the same."
            )
        inputs[name] = values[0]
    return inputs


def group_by_shape(
    rows: list[dict[str, Any]], accepted: set[str], describe_prompt: Callable[[dict[str, Any]], Any] | None = None
) -> list[list[int]]:
    """Return groups of indices of rows that may share a pipeline call, in the order of the rows."""
    groups: dict[tuple, list[int]] = {}
    for index, row in enumerate(rows):
        key = tuple(
            (name, _shape(value, is_item=name in NUMBERS_OF_SAMPLES))
            for name, value in row.items()
            if name in accepted
        )
        prompt_shape = None if describe_prompt is None else describe_prompt(row)
        groups.setdefault((key, prompt_shape), []).append(index)
    return list(groups.values())


def _shape(value: Any, is_item: bool = False) -> Any:
    """Return what the values of one call must have in common."""
    if value is None or isinstance(value, bool | int | float) and not is_item:
        return value
    if isinstance(value, Image.Image):
        return value.size, value.mode
    if isinstance(value, (list, tuple)):
        return tuple(_shape(item, is_item=True) for item in value)
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__


def _is_per_sample(name: str, value: Any) -> bool:
    """Return whether each sample gets its own copy of an argument that is set for all: a prompt, or images."""
    images = value if isinstance(value, list) and value else [value]
    is_text = isinstance(value, str) and "prompt" in name
    return is_text or all(isinstance(image, Image.Image) for image in images)


def explain_reserved(name: str) -> str | None:
    """Return why the user must not give an argument of the pipeline's call, or None if it is allowed."""
    if name in SAMPLE_COUNTS:
        return f"{name} would hide samples from the groups, whose size is num_generations"
    return f"{name} is set by the trainer" if name in SET_BY_TRAINER else None


def find_missing(parameters: Mapping[str, inspect.Parameter], given: Collection[str]) -> list[str]:
    """Return the parameters without a default that are not `given`; embeddings may replace the prompt."""
    needed = [name for name, it in parameters.items() if it.default is it.empty and it.kind not in VARIADIC]
    return [name for name in needed if name not in {"self", "prompt", *given}]


def _measure(sample: Any) -> dict[str, int]:
    """Return height and width of an image, and the number of frames of a video; nothing of other samples."""
    frames = sample if isinstance(sample, list) else [sample]
    if not frames or not isinstance(frames[0], Image.Image):
        return {}
    size = {"height": frames[0].height, "width": frames[0].width}
    return size | ({"num_frames": len(frames)} if isinstance(sample, list) else {})


def prepare_inputs(
    pipe: type[DiffusionPipeline], args: DiffusionGRPOConfig, named: list[tuple[str, Dataset]], rewards: list[Reward]
) -> PipelineInputs:
    """Make the inputs of a pipeline class, and check settings and datasets against it; see `PipelineInputs`."""
    asked = set().union(*map(list_columns, rewards)) - {*PROVIDED}  # rewards get no columns of these names
    inputs = PipelineInputs(pipe, args, asked)
    if getattr(args, "validation_prompts", None) and (missing := inputs.find_missing(())):
        raise ValueError(
            f"validation_prompts contain only prompts, but {pipe.__name__} cannot be called without {missing[0]!r}; "
            "use an eval_dataset with such a column instead."
        )
    for name, dataset in named:
        inputs.check(dataset, name)
    return inputs
