"""From dataset rows to pipeline calls: which samples share a call, and its keyword arguments.

Equal rows give equal arguments in rollout, replay and evaluation. The signature of the pipeline says which columns it
takes, and a trial call shows whether it takes several samples at once (`policy/batching.py`). Samples of different
shapes never share a call.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline
from PIL import Image

from ..config.call_arguments import RESERVED, SAMPLE_COUNTS, check_pipeline_kwargs, explain_reserved
from ..config.settings import DiffusionGRPOConfig
from ..distributed.collectives import broadcast_bytes, gather_json
from ..media.serialize import pack_samples, unpack_samples
from ..policy.base import UntrainedStepError
from ..policy.batching import BATCHED, LISTED, SINGLE, Form, find_form
from ..policy.rollout import Policy, UnsupportedPipeline
from ..rewards.contract import PROVIDED, VARIADIC, Reward, list_columns
from .calls import build_arguments, group_by_shape
from .columns import Columns, RowError, fit_images, list_given
from .embeddings import check_embeddings, find_replaced_texts, is_embedding

FROM_CONFIG = ("guidance_scale", "height", "width", "num_frames")
logger = logging.getLogger(__name__)
SOURCES = ("image", "images", "video", "mask_image", "control_image", "control_video")  # what samples are made from
RATES = ("frame_rate", "fps")  # names in diffusers for the frames per second of the videos
FPS = 16.0  # of pipelines without such a parameter


class PipelineInputs:
    """Builds the keyword arguments of a pipeline call from dataset rows.

    Args:
        pipe: the pipeline, or its class.
        args: settings of the run; `guidance_scale`, `height`, `width`, `num_frames` and `pipeline_kwargs` go into
            every call, `sigmas` into those of training.
        asked: names of the columns that rewards read.

    Attributes:
        fps: frames per second of videos.

    Raises:
        ValueError: the pipeline's `__call__` does not take a setting (the message lists what it takes), an argument in
            `pipeline_kwargs` must not be given, or `fps` contradicts the frame rate with which the pipeline makes
            videos.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline | type[DiffusionPipeline],
        args: DiffusionGRPOConfig,
        asked: Collection[str] = (),
    ):
        self.args, self._asked = args, frozenset(asked)
        self.pipeline = pipe if isinstance(pipe, type) else type(pipe)
        parameters = inspect.signature(self.pipeline.__call__).parameters
        reserved = RESERVED | SAMPLE_COUNTS
        self._reserved = reserved & parameters.keys()
        self.parameters = {k: v for k, v in parameters.items() if k not in {"self", *reserved}}
        self.accepted = set(self.parameters)
        self.fixed = {name: getattr(args, name) for name in FROM_CONFIG if getattr(args, name) is not None}
        check_pipeline_kwargs(args.pipeline_kwargs)  # the settings of `sample` are not checked before
        self._image_mode = find_image_mode(pipe)
        for name, value in (args.pipeline_kwargs or {}).items():
            self.fixed[name] = fit_images(value, None if "mask" in name else self._image_mode)
        self._spacing = {} if args.sigmas is None else {"sigmas": list(args.sigmas)}
        if self._spacing and "sigmas" not in parameters:
            raise ValueError(
                f"sigmas: {self.pipeline.__name__} spaces its steps itself and takes no sigmas; leave them out."
            )
        unknown = sorted(set(self.fixed) - self.accepted)
        if unknown:
            raise ValueError(
                f"{self.pipeline.__name__} does not take {', '.join(unknown)} from the settings; it takes "
                f"{', '.join(sorted(self.accepted))}."
            )
        self.fps = self._find_fps()
        self._is_size_told = False
        self._columns: dict[int, tuple[Dataset, Columns]] = {}
        self.forms: dict[frozenset[str], Form] = {}  # by the names of the columns that a row has
        self.draws_globally = False  # whether the trial calls drew from torch's global generator
        self.describe_prompt: Callable[[dict[str, Any]], Any] | None = None  # what prompts of a call share

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

    def of_evaluation(self, rows: list[dict[str, Any]], **overrides: Any) -> dict[str, Any]:
        """Return the keyword arguments of an evaluation's call, which keeps the pipeline's own spacing of steps."""
        return {name: value for name, value in self(rows, **overrides).items() if name not in self._spacing}

    def arguments(self, rows: list[dict[str, Any]], form: str) -> dict[str, Any]:
        """Return the keyword arguments for these rows in one form; see [`~diffusion_grpo.policy.batching.Form`]."""
        replaced = find_replaced_texts(rows[0], self.accepted)
        fixed = {name: value for name, value in self.fixed.items() if name not in replaced}
        if form != SINGLE:  # not every pipeline repeats a single negative prompt
            texts = {name: value for name, value in fixed.items() if isinstance(value, str) and "prompt" in name}
            fixed = fixed | {name: [value] * len(rows) for name, value in texts.items()}
        # a text that is not None by default would be passed together with the embeddings
        unset = {name: None for name in replaced & self.accepted if self.parameters[name].default is not None}
        return {**fixed, **self._spacing, **unset, **build_arguments(rows, self.accepted, is_bare=form == SINGLE)}

    def check_overrides(self, overrides: dict[str, Any]) -> None:
        """Refuse arguments of a single call that the trainer sets, or that the pipeline does not take.

        Raises:
            ValueError: there is such an argument.
        """
        check_pipeline_kwargs(overrides)
        if unknown := sorted(overrides.keys() - self.accepted):
            raise ValueError(
                f"pipeline_kwargs: {self.pipeline.__name__} does not take {', '.join(unknown)}; it takes "
                f"{', '.join(sorted(self.accepted))}."
            )

    def find_given(self, row: dict[str, Any]) -> frozenset[str]:
        """Return the names of the pipeline's inputs that a row holds; `forms` has a form for each such set."""
        return frozenset(name for name in self.accepted & row.keys() if row[name] is not None)

    def columns(self, dataset: Dataset) -> Columns:
        """Return the reader of a dataset's rows."""
        if id(dataset) not in self._columns:
            self._columns[id(dataset)] = dataset, Columns(dataset, self.parameters, self._image_mode)
        return self._columns[id(dataset)][1]

    def rows(self, dataset: Dataset, indices: list[int]) -> list[dict[str, Any]]:
        """Return rows of the dataset with their files decoded; see [`~diffusion_grpo.data.columns.Columns.rows`]."""
        return self.columns(dataset).rows(indices)

    def find_images(self, row: dict[str, Any]) -> list[Image.Image]:
        """Return the images of a row that the pipeline takes, masks last; of a video, its first frame."""
        found: list[Image.Image] = []
        for name in sorted(self.parameters, key=lambda name: "mask" in name):  # otherwise in their order
            value = row.get(name)
            items = value if isinstance(value, list) else [value]
            images = [item for item in items if isinstance(item, Image.Image)]
            found += images[:1] if "video" in name else images
        return found

    def check_samples(self, samples: Any, count: int, arguments: Mapping[str, Any]) -> None:
        """Refuse the wrong number of samples of a call; warn once if they do not have the size that was asked for.

        Args:
            samples: output of the call.
            count: number of samples that were asked for.
            arguments: keyword arguments of the call.

        Raises:
            UnsupportedPipeline: the number of samples is wrong.
        """
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
        """Refuse a dataset whose files cannot be read; warn of images, videos and sound that nothing takes.

        Args:
            dataset: the user's dataset.
            name: the argument that it was passed as, for the message.

        Raises:
            ValueError: there are neither prompts nor embeddings, or a column is missing that the pipeline needs; or as
                in `check_columns`.
        """
        if "prompt" not in dataset.column_names and not any(map(is_embedding, self.accepted)):
            raise ValueError(
                f"{name} has no column 'prompt', and {self.pipeline.__name__} takes no prompt_embeds; add the prompts."
            )
        check_embeddings(dataset, self.accepted, name, self.pipeline.__name__)
        given = list_given(dataset)
        if missing := self.find_missing(given):
            raise ValueError(
                f"{name} has no column {missing[0]!r}, and {self.pipeline.__name__} cannot be called without it; add "
                f"the column, or rename the one that holds it (there are {', '.join(given)})."
            )
        self.check_columns(dataset, name)
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

    def check_sources(self, policy: Policy, named: list[tuple[str, Dataset]], prompts: list[str]) -> None:
        """Refuse rows without an image, a mask or a video that the pipeline cannot be called without.

        Many pipelines need an image although its parameter has a default. A run would fail only when it draws such a
        row. So the pipeline is called, up to its network, with a row of each kind that lacks an input of this sort.

        Args:
            policy: policy of the pipeline.
            named: the datasets, with the names that messages use for them.
            prompts: prompts that are sampled without a dataset (`validation_prompts`).

        Raises:
            ValueError: there is such a row.
        """
        sources = {name for name in SOURCES if name in self.accepted and name not in self.fixed}
        if not sources or policy.draws_tokens or policy.writer is not None:  # whose tokens would be written for this
            return
        kinds: dict[frozenset[str], tuple[str, dict[str, Any]]] = {}  # by what is absent: where, and the row
        for name, dataset in named:
            for filled, index in self.columns(dataset).find_filled(sources).items():
                if (absent := frozenset(sources - filled)) and absent not in kinds:
                    kinds[absent] = f"{name}, row {index} (the first is row 0)", self.rows(dataset, [index])[0]
        if prompts and frozenset(sources) not in kinds:
            kinds[frozenset(sources)] = "validation_prompts", {"prompt": prompts[0]}
        for absent, (place, row) in kinds.items():
            refusal = self._find_refusal(policy, row, BATCHED, 1)
            if refusal is None or any(self._find_refusal(policy, row, form, 1) is None for form in (SINGLE, LISTED)):
                continue
            raise ValueError(
                f"{place}: {self.pipeline.__name__} fails without {' and '.join(sorted(absent))}, with "
                f"{type(refusal).__name__}: {' '.join(str(refusal).split())}"
            )

    def check_columns(self, dataset: Dataset, name: str) -> None:
        """Refuse columns that the pipeline could take and never gets, and files that cannot be read.

        A column with the name of an argument that the trainer sets itself is accepted if a reward reads it.

        Args:
            dataset: the user's dataset.
            name: the argument that it was passed as, for the message.

        Raises:
            ValueError: there is such a column, or as in [`~diffusion_grpo.data.columns.Columns.check`].
        """
        for column in list_given(dataset):
            if column.startswith("callback") and column in self.accepted:
                raise ValueError(
                    f"{name}, column {column!r}: a callback of {self.pipeline.__name__} is a function, which a row "
                    "cannot contain; rename the column."
                )
            if column in RATES and column in self.accepted:
                raise ValueError(
                    f"{name}, column {column!r}: all videos of a run have the same frames per second; set "
                    f"pipeline_kwargs: {{{column}: ...}}, and remove or rename the column."
                )
            if column in self._reserved - self._asked:
                advice = "" if column in PROVIDED else ", or name it as a parameter of the reward that reads it"
                raise ValueError(f"{name}, column {column!r}: {explain_reserved(column)}; rename the column{advice}.")
        self.columns(dataset).check(name)

    def learn(
        self,
        policy: Policy,
        rows: list[dict[str, Any]],
        noise_level: float | None,
        args: DiffusionGRPOConfig | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Find out, once per set of columns, whether samples can share a call; `parts` and `__call__` depend on it.

        Args:
            policy: policy of the pipeline.
            rows: decoded rows of the dataset.
            noise_level: noise level of the policy's process; None for tokens.
            args: settings with the sizes and steps to use if the pipeline is only sampled from; by default those of
                the constructor.
            accelerator: given if all processes must call the network together. They then try the same rows: for each
                set of columns that is new to some process, the row of the first such process. A collective.

        Raises:
            RowError: the pipeline takes the rows in no form; its error is chained.
        """
        if policy.draws_tokens:  # such pipelines take a list of prompts
            return
        is_trained, args = args is None, args or self.args
        asked: dict[frozenset[str], dict[str, Any]] = {}
        for row in rows:
            given = self.find_given(row)
            if given not in self.forms:
                asked.setdefault(given, {name: row[name] for name in row if name in given})
        for given, row in (asked if accelerator is None else _gather_asked(asked, accelerator)).items():
            try:
                self.forms[given] = self._find_form(policy, row, noise_level, args, is_trained)
            except (UnsupportedPipeline, UntrainedStepError, torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # any error of the pipeline, or of its network
                if any(self._find_refusal(policy, row, name, 1) is None for name in (BATCHED, SINGLE, LISTED)):
                    raise  # the network failed
                own = f" (prompt {row['prompt']!r})" if isinstance(row.get("prompt"), str) else ""
                raise RowError(
                    f"{self.pipeline.__name__} fails on a row with {', '.join(sorted(given))}{own}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _find_form(
        self,
        policy: Policy,
        row: dict[str, Any],
        noise_level: float | None,
        args: DiffusionGRPOConfig,
        is_trained: bool,
    ) -> Form:
        """Find the form by calling the pipeline with one row; warn if it takes samples only one by one."""
        count = args.rollout_call_size
        if count == 1:  # evaluations and updates may have larger calls
            count = min(2, max(args.per_device_train_batch_size, args.eval_batch_size))
        start, stop = args.window
        last = args.num_inference_steps - 1  # has no noise; only re-noised samples train it
        start = min(start, last - 1)
        drew, policy.draws_globally = policy.draws_globally, False  # draws of rewards and decoders do not count
        try:
            form = find_form(
                policy,
                row,
                self.arguments,
                count,
                num_inference_steps=args.num_inference_steps,
                steps=list(range(start, min(start + 2, stop, last))),
                noise_level=noise_level,
            )
        finally:
            self.draws_globally |= policy.draws_globally
            policy.draws_globally |= drew
        if self._spacing:
            self._check_times(policy)
        if "strength" not in row:  # another row may take more steps
            self._check_window(policy, args)
            self._check_networks(policy, row, form, args, is_trained)
        if form.reason is not None and count > 1:
            logger.warning(
                "%s does not take several samples in one call (%s); they are rolled out and replayed one by one.",
                self.pipeline.__name__,
                form.reason,
            )
        return form

    def _check_times(self, policy: Policy) -> None:
        """Refuse `sigmas` if the timesteps that the last call gave the network do not match them.

        GLM-Image and CogView4 set timesteps of their own in addition to the sigmas.

        Raises:
            UnsupportedPipeline: the timesteps do not match.
        """
        scheduler = policy.scheduler
        times = scheduler.timesteps.cpu().float() / scheduler.config.num_train_timesteps
        if not torch.allclose(times, scheduler.sigmas[: len(times)].cpu().float(), atol=1e-3):
            raise UnsupportedPipeline(
                f"sigmas: {self.pipeline.__name__} passes its network times that it computes itself, which would not "
                "match those of the steps; leave sigmas out."
            )

    def _check_window(self, policy: Policy, args: DiffusionGRPOConfig) -> None:
        """Refuse a window that reaches beyond the steps of the last call; a later rollout would draw such a step.

        Raises:
            UnsupportedPipeline: the window reaches too far.
        """
        steps, length = args.trainable_steps, policy.loop_length
        if length is not None and steps.stop > (length if args.traits.is_renoised else length - 1):
            raise UnsupportedPipeline(
                f"{self.pipeline.__name__} takes {length} of {args.num_inference_steps} steps with these inputs (as "
                f"with a strength below 1), but steps {steps.start} to {steps.stop - 1} may be trained, and the last "
                "one has no noise; set sde_window, or raise num_inference_steps."
            )

    def _check_networks(
        self, policy: Policy, row: dict[str, Any], form: Form, args: DiffusionGRPOConfig, is_trained: bool
    ) -> None:
        """Refuse networks that no step calls, and a window with a step of an expert that is not trained.

        A later rollout would draw such a step. Warn of an expert that is to be trained but that no trained step calls.

        Raises:
            UntrainedStepError: there is such a network or step.
        """
        others = [name for name in policy.component if name not in policy.experts]  # such as a text encoder
        experts = [name for name in policy.component if name in policy.experts] if is_trained else []
        if not (policy.frozen_experts or others or len(experts) > 1):
            return
        passing = policy.find_passing_steps(self.arguments([row], form.name), args.num_inference_steps)
        for name in others:
            if not passing[name] - {0}:  # encoding prompts before the loop counts as step 0
                alone = " and ".join(policy.experts) or "another network"
                raise UntrainedStepError(
                    f"{name} (train_component) runs in no step of {self.pipeline.__name__}'s loop, so it cannot be "
                    f"trained; train {alone} alone."
                )
        found = set().union(*passing.values())
        for step in args.trainable_steps:
            if step not in found:
                policy.refuse_step(step, found)
        for name in experts:
            if passing[name].isdisjoint(args.trainable_steps):
                logger.warning(
                    "%s will not be trained: it runs in %s, and only %s may be trained. Set sde_window to train it "
                    "too, or train_component=%r to spare its memory.",
                    name,
                    _describe_steps(passing[name]),
                    _describe_steps(args.trainable_steps),
                    ", ".join(other for other in policy.component if other != name),
                )

    def check_shared_calls(self, policy: Policy, row: dict[str, Any], loss_type: str) -> None:
        """Refuse a pipeline that takes one sample per call, if this shows before its network runs.

        Args:
            policy: policy of the pipeline.
            row: decoded row of the dataset.
            loss_type: name of a loss that compares the samples of a prompt.

        Raises:
            UnsupportedPipeline: the pipeline takes the row once but not twice.
        """
        if (reason := self._find_refusal(policy, row, BATCHED, 2)) is None:
            return
        if all(self._find_refusal(policy, row, form, 1) is not None for form in (SINGLE, LISTED)):
            return  # the first rollout reports what is wrong
        self.forms[self.find_given(row)] = Form(SINGLE, " ".join(str(reason).split()).rstrip("."))
        self.refuse_single([row], loss_type)

    def _find_refusal(self, policy: Policy, row: dict[str, Any], form: str, count: int) -> Exception | None:
        """Return the error with which the pipeline refuses copies of a row before its network runs; None if none."""
        drew = policy.draws_globally
        try:
            policy.reach_network(self.arguments([row] * count, form), self.args.num_inference_steps, count)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever goes wrong inside the pipeline is an answer to the question
            return error
        finally:
            policy.prompts.clear()
            policy.draws_globally = drew  # a rollout may leave out what drew here
        return None

    def refuse_single(self, rows: list[dict[str, Any]], loss_type: str) -> None:
        """Refuse rows that cannot share a call with others, for a loss that compares the samples of a prompt.

        Raises:
            UnsupportedPipeline: `learn` has found that there is such a row.
        """
        forms = (self.forms.get(self.find_given(row), Form(BATCHED)) for row in rows)
        single = next((form for form in forms if form.name != BATCHED), None)
        if single is not None:
            raise UnsupportedPipeline(
                f"loss_type={loss_type!r} compares the samples of a prompt within one pipeline call, but "
                f"{self.pipeline.__name__} takes one sample per call ({single.reason}); use loss_type='nft' or 'awm'."
            )

    def parts(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Return the indices of the rows of each call: rows with equal numbers and shapes, or single rows."""
        parts = []
        for part in group_by_shape(rows, self.accepted, self.describe_prompt):
            is_batched = self.forms.get(self.find_given(rows[part[0]]), Form(BATCHED)).name == BATCHED
            parts += [part] if is_batched else [[index] for index in part]
        return parts

    def calls(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Return the indices of the samples of each pipeline call of a rollout, at most `rollout_call_size` per call.

        Args:
            rows: one row per sample.
        """
        size = self.args.rollout_call_size
        starts = range(0, len(rows), size)
        return [[start + i for i in indices] for start in starts for indices in self.parts(rows[start : start + size])]


def find_missing(parameters: Mapping[str, inspect.Parameter], given: Collection[str]) -> list[str]:
    """Return the parameters of a pipeline's call that have no default and are not `given`.

    The prompt never counts as missing, since embeddings may replace it.
    """
    needed = [name for name, it in parameters.items() if it.default is it.empty and it.kind not in VARIADIC]
    return [name for name in needed if name not in {"self", "prompt", *given}]


def _describe_steps(steps: Collection[int]) -> str:
    if not steps:
        return "no step"
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _gather_asked(
    own: dict[frozenset[str], dict[str, Any]], accelerator: Accelerator
) -> dict[frozenset[str], dict[str, Any]]:
    """Return a row for each set of columns that some process asks about, in the same order everywhere; a collective.

    The row is the decoded row of the first such process.
    """
    found: dict[frozenset[str], dict[str, Any]] = {}
    for process, asked in enumerate(gather_json(accelerator, [sorted(given) for given in own])):
        for given in map(frozenset, asked):
            if given not in found:
                packet = pack_samples([own[given]], None) if process == accelerator.process_index else None
                (found[given],), _ = unpack_samples(broadcast_bytes(accelerator, packet, process), torch.device("cpu"))
    return found


def find_image_mode(pipe: DiffusionPipeline | type[DiffusionPipeline]) -> str:
    """Return the mode of the images that a pipeline takes: RGBA if its VAE encodes four channels, as for layers."""
    config = getattr(getattr(pipe, "vae", None), "config", {})
    return "RGBA" if config.get("input_channels", config.get("in_channels")) == 4 else "RGB"


def _measure(sample: Any) -> dict[str, int]:
    """Return height and width of an image, and the number of frames of a video; nothing of other samples."""
    frames = sample if isinstance(sample, list) else [sample]
    if not frames or not isinstance(frames[0], Image.Image):
        return {}
    found = {"height": frames[0].height, "width": frames[0].width}
    return found | ({"num_frames": len(frames)} if isinstance(sample, list) else {})


def prepare_inputs(
    pipe: type[DiffusionPipeline],
    args: DiffusionGRPOConfig,
    named: list[tuple[str, Dataset]],
    rewards: list[Reward],
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
