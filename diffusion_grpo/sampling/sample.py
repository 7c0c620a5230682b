"""Sample from a dataset of prompts without training, and write files, a table and scores to a folder.

Samples come from the pipeline's own scheduler or are drawn with the noise of a rollout. A job may take days, so an
interrupted job continues with the missing samples.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import torch
from datasets import Dataset
from tqdm import tqdm

from ..algorithms.advantages import combine, compute_advantages, load_advantage_fn
from ..data.call_form import learn_forms
from ..data.calls import LISTED, SINGLE, Form
from ..data.columns import Columns, drop_format
from ..data.inputs import RATES, PipelineInputs, prepare_inputs
from ..data.prompts import get_prompt_column, get_prompts
from ..media.files import extract_samples, find_sampling_rate
from ..pipelines import family_of
from ..policy.base import call_arguments, list_filters, policy_component, without_filters
from ..policy.rollout import rollout, sample_seed
from ..policy.token import make_policy
from ..report.record import write_json
from ..report.run_folder import measure_mean
from ..report.samples import write_files, write_table
from ..rewards import Reward, reward_weights, score
from ..rewards.contract import is_marked
from ..rollout.score import check_extra_column
from ..rollout.steps import make_sampling_plan
from ..training.model import choose_device, load_pipeline, load_plain_pipeline, make_block_swap, plan_quantization
from ..training.model_checks import check_packages, pipeline_class
from ..training.offload import place_frozen_parts
from ..weights.files import load_weights
from .settings import SampleSettings

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)
TABLE, JOB = "samples.parquet", "sample.json"
COMBINED = ("reward", "advantage")  # columns of the table


def check_folder(settings: SampleSettings, dataset: Dataset) -> None:
    """Check that the output folder holds no samples of another job. A part of the same job is fine."""
    folder, path, count = settings.output_dir, settings.output_dir / TABLE, settings.num_generations
    if not path.is_file():
        return
    job, change = _read_job(settings), "choose another --output_dir, or delete it."
    for name, here in settings.identity.items():
        if job.get(name) != here:
            there = job.get(name)
            raise ValueError(
                f"{folder} contains samples of another job ({name} is {there!r} there and {here!r} here); {change}"
            )
    table = pyarrow.parquet.read_table(path).to_pylist()
    for row, prompt in zip(table[::count], get_prompt_column(dataset)):
        if (there := row.get("prompt", "")) != prompt:  # no column `prompt` if there are only embeddings
            raise ValueError(f"{path} contains samples of {there!r}, but the prompt is {prompt!r}; {change}")
    for number, (there, here) in enumerate(zip(job.get("rows", [])[: len(table) // count], hash_rows(dataset))):
        if there != here:
            raise ValueError(f"{path} was made from other columns in row {number} (the first is row 0); {change}")


def _read_job(settings: SampleSettings) -> dict[str, Any]:
    path = settings.output_dir / JOB
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def hash_rows(dataset: Dataset) -> list[str]:
    """Return a hash of each row; files that are not stored in the dataset are hashed by their paths."""
    rows = (json.dumps(row, sort_keys=True, default=repr) for row in Columns(dataset, {}).dataset)
    return [hashlib.sha256(row.encode()).hexdigest()[:16] for row in rows]


def check_inputs(settings: SampleSettings, dataset: Dataset, rewards: list[Reward]) -> None:
    """Check the settings, columns and files of a job against the class of its pipeline, before the pipeline is
    loaded.
    """
    _check_batchwise(settings, len(dataset), rewards)
    pipeline = pipeline_class(settings.model, settings.train or settings)
    if settings.train is None:
        replaced = [name for name in RATES if name in settings.pipeline_kwargs and name in dataset.column_names]
        dataset = dataset.remove_columns(replaced)  # an option sets the rate of all samples
    if pipeline is not None:  # None for code that is not downloaded yet
        prepare_inputs(pipeline, settings, [("--prompts", dataset)], rewards)


def load_pipeline_to_sample(settings: SampleSettings) -> "DiffusionPipeline":
    """Load the pipeline with its LoRA or trained weights, and place it as [`place`] does.

    With the settings of a run, and unless `settings.dtype` is set, the pipeline is loaded as training does.
    """
    train = settings.train
    device = choose_device(settings.device or (None if train is None else str(train.device)))
    check_packages(settings.model, train or settings)
    if train is None or settings.dtype is not None:
        kwargs = (train or settings).model_init_kwargs
        pipe = load_plain_pipeline(settings.model, settings.dtype, str(device), False, kwargs)
    else:
        quantized = plan_quantization(settings.model, train, is_full_training=False)
        pipe = load_pipeline(settings.model, train, is_full_training=False, quantized=quantized)
    if settings.lora is not None:
        load_weights(pipe, settings.lora, component=policy_component(pipe, train.train_component if train else None))
    place(pipe, settings, device)
    return pipe


def place(pipe: "DiffusionPipeline", settings: SampleSettings, device: torch.device) -> None:
    """Move a pipeline to a device, except for what the settings keep in CPU memory until it is needed.

    As in training, `offload_frozen` keeps all but the network there, and `group_offload` most of the network. A run
    with `cache_prompt_embeds` frees its text encoders; here they are offloaded with the other parts.
    """
    train, offload = settings.train, settings.offload_frozen
    if offload is None and train is not None and train.cache_prompt_embeds != "off" and pipe.model_cpu_offload_seq:
        offload = "cpu"
    swaps_blocks = train is not None and train.group_offload is not None
    if offload is None and not swaps_blocks:
        pipe.to(device)
        return
    component = policy_component(pipe, None if train is None else train.train_component)
    networks = [getattr(pipe, name) for name in component]
    for network in networks:
        network.requires_grad_(False)
        if swaps_blocks:
            make_block_swap(train, device).install(network)
        else:
            network.to(device)
    place_frozen_parts(pipe, networks, device, offload)


def count_prompts_at_once(settings: SampleSettings) -> int:
    """Return how many prompts are sampled and scored before the table is written."""
    return max(1, settings.batch_size // settings.num_generations)


def _check_batchwise(settings: SampleSettings, prompts: int, rewards: list[Reward]) -> None:
    """Refuse rewards that compare all samples of a job, if the samples are scored in parts, or some already are."""
    path, samples = settings.output_dir / TABLE, prompts * settings.num_generations
    made = pyarrow.parquet.read_metadata(path).num_rows if path.is_file() else 0
    if made not in (0, samples):
        size, remedy = made, "choose another --output_dir"
    elif prompts > count_prompts_at_once(settings):
        size, remedy = settings.batch_size, f"set --batch_size to {samples}"
    else:
        return
    for reward in rewards:
        if is_marked(reward.function, "is_batchwise"):
            raise ValueError(
                f"The reward {reward.name!r} compares all {samples} samples, but {size} are scored at once; {remedy}, "
                "or leave the reward out."
            )


def write_samples(
    pipe: "DiffusionPipeline",
    dataset: Dataset,
    rewards: list[Reward],
    eval_rewards: list[Reward],
    settings: SampleSettings,
) -> dict[str, tuple[float, float | None]]:
    """Generate and score `num_generations` samples per row, and write their files and `samples.parquet`.

    Sample i has the seed `settings.seed + i`, so its result does not depend on batches or interruptions. The files are
    named `0000.png` (`.mp4`, `.wav`) and so on. The table is written after each batch, and samples that it lists are
    not made again.
    """
    path, count = settings.output_dir / TABLE, settings.num_generations
    table = pyarrow.parquet.read_table(path).to_pylist() if path.is_file() else []
    make = Sampler(pipe, settings)
    hashes, plain = hash_rows(dataset), drop_format(dataset)
    hashes += _read_job(settings).get("rows", [])[len(hashes) : len(table) // count]  # of samples beyond these prompts
    write_json(settings.output_dir / JOB, settings.identity | {"rows": hashes})
    step = count_prompts_at_once(settings)
    with tqdm(total=len(dataset) * count, initial=min(len(table), len(dataset) * count), unit="sample") as bar:
        for first in range(len(table) // count, len(dataset), step):
            prompts = range(first, min(first + step, len(dataset)))
            positions = [prompt * count + turn for prompt in prompts for turn in range(count)]
            rows = make.inputs.rows(dataset, [position // count for position in positions])
            samples = make(rows, positions)
            rates = make.inputs.fps, find_sampling_rate(pipe)
            scores = _score(rewards + eval_rewards, samples, rows, positions, settings, *rates)
            # the dataset's own rows, where media are file names
            as_written = [plain[position // count] for position in positions]
            table += _make_rows(samples, as_written, positions, scores, settings, *rates)
            write_table(path, _make_columns(table))
            bar.update(len(positions))
    return _finish(table, len(dataset) * count, rewards, eval_rewards, settings)


class Sampler:
    """A sampler of dataset rows, with the pipeline's own scheduler or with the noise of a training rollout."""

    def __init__(self, pipe: "DiffusionPipeline", settings: SampleSettings):
        self.pipe, self.settings, train = pipe, settings, settings.train
        self.inputs = PipelineInputs(pipe, settings)
        self.overridden = set() if train else set(self.inputs.fixed)  # columns that command-line values replace
        component = train.train_component if train else None
        self.policy = None
        if train or settings.noise_level != 0:
            sampling = train.token_sampling if component is not None and train else None
            self.policy = make_policy(pipe, component, sde_type=settings.sde_type, sampling=sampling)
        pipe.set_progress_bar_config(disable=True)
        if filters := list_filters(pipe):
            logger.warning("Samples are made without %s, as in training.", ", ".join(filters))

    def __call__(self, rows: list[dict[str, Any]], positions: list[int]) -> list[Any]:
        """Generate the samples of `rows`. `positions` are their positions in the whole job."""
        settings, samples = self.settings, [None] * len(rows)
        rows = [{name: value for name, value in row.items() if name not in self.overridden} for row in rows]
        # tokens are drawn at random even if the steps after them are noiseless
        is_drawn = settings.noise_level != 0 or (self.policy is not None and self.policy.draws_tokens)
        make = self._sample_with_noise if is_drawn else self._sample_plainly
        if settings.train is not None:
            level = settings.train.noise_level or self.policy.default_noise_level
            learn_forms(self.inputs, self.policy, rows, level, settings.train)
        for first in range(0, len(rows), settings.batch_size):
            for part in self._split(rows[first : first + settings.batch_size]):
                chosen = [first + number for number in part]
                made = self._call(make, [rows[row] for row in chosen], [positions[row] for row in chosen])
                self.inputs.check_samples(made, len(chosen), self.inputs([rows[chosen[0]]]))
                for row, sample in zip(chosen, made, strict=True):
                    samples[row] = sample
        return samples

    def _call(self, make: Callable, rows: list[dict[str, Any]], positions: list[int]) -> Any:
        """Call the pipeline with these rows; if it refuses lists of such rows, go on with one sample per call."""
        given, forms = self.inputs.find_given(rows[0]), self.inputs.forms
        try:
            return make(self.inputs(rows), positions)
        except torch.OutOfMemoryError:
            raise
        except Exception as refused:  # any error of the pipeline
            if given in forms:
                raise
            for name in (SINGLE, LISTED):
                forms[given] = Form(name, str(refused))
                try:
                    made = [make(self.inputs([row]), [at])[0] for row, at in zip(rows, positions, strict=True)]
                except torch.OutOfMemoryError:
                    raise
                except Exception:  # nor does it take this form
                    del forms[given]
                else:
                    reason = " ".join(str(refused).split())
                    logger.warning("The pipeline takes these samples only one by one (%s).", reason)
                    return made
            raise

    def _split(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Return the indices of the rows of each call.

        Without a run's settings no trial call has found out how the pipeline reads lists, and some take a list of
        images for the images of one sample. So rows that hold more than texts and numbers get calls of their own.
        """
        parts = self.inputs.parts(rows)
        if self.settings.train is not None or all(map(self._is_plain, rows)):
            return parts
        return [[index] for part in parts for index in part]

    def _is_plain(self, row: dict[str, Any]) -> bool:
        given = [row[name] for name in self.inputs.accepted & row.keys()]
        return all(value is None or isinstance(value, (str, int, float)) for value in given)

    def _sample_plainly(self, inputs: dict[str, Any], positions: list[int]) -> Any:
        seeds = torch.tensor([self.settings.seed + position for position in positions])
        arguments = call_arguments(self.pipe, inputs, self.settings.num_inference_steps, seeds)
        with family_of(self.pipe).bridged(self.pipe), without_filters(self.pipe):
            return extract_samples(self.pipe, self.pipe(**arguments))

    def _sample_with_noise(self, inputs: dict[str, Any], positions: list[int]) -> Any:
        settings, count = self.settings, self.settings.num_generations
        seeds = [settings.seed + position for position in positions]
        sharing = min(settings.samples_per_latent or count, count)
        self.policy.prompts.clear()
        samples, _ = rollout(
            self.policy,
            inputs,
            seeds=[sample_seed(seed, "noise") for seed in seeds],
            initial_seeds=[settings.seed + position - position % count % sharing for position in positions],
            num_inference_steps=settings.num_inference_steps,
            steps=[[]] * len(positions),
            noise_steps=self.choose_noise_steps(positions),
            noise_in_last_step=getattr(settings.train, "noisy_steps", None) == "all_and_last",
            noise_level=settings.noise_level,
        )
        return samples

    def choose_noise_steps(self, positions: list[int]) -> list[range] | None:
        """Choose the steps that draw noise for the sample at each position; None for all steps.

        If the trained steps move, they move after as many samples as a training rollout has.
        """
        train = self.settings.train
        if train is None or not train.is_noise_limited:
            return None
        plan, prompts = make_sampling_plan(train), train.batch_sizes.prompts_per_rollout
        rollouts = [divmod(position // self.settings.num_generations, prompts) for position in positions]
        return [plan.draw_steps(*rollout) for rollout in rollouts]


def _score(
    rewards: list[Reward],
    samples: list[Any],
    rows: list[dict],
    positions: list[int],
    settings: SampleSettings,
    fps: float,
    rate: int | None,
) -> dict[str, list]:
    """Score the samples. Return one column per reward, and the columns that rewards add."""
    if not rewards:
        return {}
    extra: dict[str, list] = {}
    kind = "videos" if isinstance(samples[0], list) else "images"
    values = score(
        rewards,
        **{kind: samples},
        prompts=get_prompts(rows),
        columns={name: [row[name] for row in rows] for name in rows[0] if name != "prompt"},
        groups=[position // settings.num_generations for position in positions],
        fps=fps,
        sampling_rate=rate,
        log_extra=lambda name, column: extra.update({name: check_extra_column(name, column, len(rows))}),
        failure_dir=settings.output_dir / "failures",
    )
    return extra | {reward.name: column for reward, column in zip(rewards, values.T.tolist(), strict=True)}


def _make_rows(
    samples: list[Any],
    rows: list[dict],
    positions: list[int],
    scores: dict[str, list],
    settings: SampleSettings,
    fps: float,
    rate: int | None,
) -> list[dict[str, Any]]:
    """Write the files, and make one row per sample: plain columns of the dataset, files, seed, scores."""
    folder = settings.output_dir
    columns = write_files(samples, [folder / f"{position:04d}" for position in positions], folder, fps, rate)
    columns |= {"seed": [settings.seed + position for position in positions]} | scores
    made = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    taken = {*columns, *(COMBINED if settings.reward_funcs else ())}
    return [_keep_plain_columns(row, taken) | one for row, one in zip(rows, made)]


def _keep_plain_columns(row: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Keep the values of a dataset row that a table can hold. Prefix names in `taken`, e.g. `image`."""
    plain = {name: value for name, value in row.items() if isinstance(value, (str, int, float, bool, type(None)))}
    return {f"input_{name}" if name in taken else name: value for name, value in plain.items()}


def _make_columns(table: list[dict[str, Any]]) -> dict[str, list]:
    names = dict.fromkeys(name for row in table for name in row)
    return {name: [row.get(name) for row in table] for name in names}


def _finish(
    table: list[dict[str, Any]],
    size: int,
    rewards: list[Reward],
    eval_rewards: list[Reward],
    settings: SampleSettings,
) -> dict[str, tuple[float, float | None]]:
    """Add the combined reward and, if there are groups, the advantage to the table. Return the summary.

    Only the first `size` rows belong to this job. An earlier job with more prompts may have left others, which are
    kept as they are.
    """
    columns = _make_columns(table[:size])
    prompts = [row // settings.num_generations for row in range(size)]

    def summarise(values: list[float]) -> tuple[float, float | None]:
        return measure_mean(values, prompts) or (math.nan, None)

    summary = {reward.name: summarise(columns[reward.name]) for reward in rewards + eval_rewards}
    if not rewards:
        return summary
    values = torch.tensor([columns[reward.name] for reward in rewards]).T
    weights = torch.tensor(reward_weights(rewards, settings.reward_weights))
    names = ("scale_rewards", "reward_baseline", "multi_objective_aggregation", "advantage_clip", "reward_threshold")
    how = {name: getattr(settings.train, name) for name in names} if settings.train else {}
    if settings.train:
        how["advantage_fn"] = load_advantage_fn(settings.train.advantage_fn)
    if settings.num_generations > 1:
        groups = torch.arange(size) // settings.num_generations
        result = compute_advantages(values, groups, weights, **how)
        added = {"reward": result.rewards.tolist(), "advantage": result.advantages.tolist()}
    else:
        aggregation = how.get("multi_objective_aggregation", "sum_then_normalize")
        added = {"reward": combine(values, weights, aggregation, torch.zeros(size, dtype=torch.long)).tolist()}
    for number, row in enumerate(table[:size]):
        row.update({name: values[number] for name, values in added.items()})
    write_table(settings.output_dir / TABLE, _make_columns(table))
    if len(rewards) > 1:
        summary["reward"] = summarise(added["reward"])
    return summary
