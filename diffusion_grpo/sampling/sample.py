"""Sample from a dataset of prompts without training, and write files, a table and scores to a folder.

Samples come from the pipeline's own scheduler or are drawn with the noise of a rollout. A job may take days, so an
interrupted job continues with the missing samples.
"""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import torch
from datasets import Dataset
from tqdm import tqdm

from ..algorithms.advantages import combine, compute_advantages, load_advantage_fn
from ..data.call_form import call_in_some_form, learn_forms
from ..data.columns import Columns, drop_format
from ..data.inputs import BATCHED, RATES, PipelineInputs, prepare_inputs
from ..media.samples import extract_samples, find_sampling_rate
from ..pipelines import family_of
from ..policy.base import call_arguments, list_filters, policy_component, without_filters
from ..policy.rollout import rollout, sample_seed
from ..policy.token import make_policy
from ..report.record import write_json
from ..report.run_folder import measure_mean
from ..report.samples import write_files, write_table
from ..rewards import Reward, reward_weights, score
from ..rewards.contract import is_marked
from ..rollout.plan import SamplingPlan
from ..training.model import choose_device, load_pipeline, load_plain_pipeline, make_block_swap, plan_quantization
from ..training.model_checks import check_packages
from ..training.model_index import pipeline_class
from ..training.offload import place_frozen_parts
from ..weights.files import load_weights
from .settings import SampleSettings

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)
TABLE, JOB = "samples.parquet", "sample.json"
COMBINED = ("reward", "advantage")  # columns of the table
ADVANTAGE_SETTINGS = ("scale_rewards", "reward_baseline", "multi_objective_aggregation", "advantage_clip")
ADVANTAGE_SETTINGS += ("reward_threshold",)


def check_folder(settings: SampleSettings, dataset: Dataset) -> None:
    """Check that the output folder holds no samples of another job. A part of the same job is fine."""
    folder, job = settings.output_dir, _read_job(settings)
    remedy = "choose another --output_dir, or delete it."
    for name, here in settings.identity.items() if _count_made(settings) else ():
        if (there := job.get(name)) != here:
            raise ValueError(
                f"{folder} contains samples of another job ({name} is {there!r} there and {here!r} here); {remedy}"
            )
    made = _count_made(settings) // settings.num_generations
    for number, (there, here) in enumerate(zip(job.get("rows", [])[:made], hash_rows(dataset))):
        if there != here:
            raise ValueError(
                f"{folder} contains samples of another prompt or of other columns in row {number} (the first is row "
                f"0); {remedy}"
            )


def _count_made(settings: SampleSettings) -> int:
    path = settings.output_dir / TABLE
    return pyarrow.parquet.read_metadata(path).num_rows if path.is_file() else 0


def _read_job(settings: SampleSettings) -> dict[str, Any]:
    path = settings.output_dir / JOB
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def hash_rows(dataset: Dataset) -> list[str]:
    """Return a hash of each row; files that are not stored in the dataset are hashed by their paths."""
    rows = (json.dumps(row, sort_keys=True, default=repr) for row in Columns(dataset, {}).dataset)
    return [hashlib.sha256(row.encode()).hexdigest()[:16] for row in rows]


def check_inputs(settings: SampleSettings, dataset: Dataset, rewards: list[Reward]) -> None:
    """Check the settings, columns and files of a job before the pipeline is loaded."""
    samples = len(dataset) * settings.num_generations
    is_whole = len(dataset) <= count_prompts_at_once(settings) and _count_made(settings) in (0, samples)
    for reward in rewards:
        if is_marked(reward.function, "is_batchwise") and not is_whole:
            raise ValueError(
                f"The reward {reward.name!r} compares all {samples} samples, so they must be made at once; set "
                f"--batch_size to {samples} and choose an empty --output_dir, or leave the reward out."
            )
    pipeline = pipeline_class(settings.model, settings.train or settings)
    if settings.train is None:
        replaced = [name for name in RATES if name in settings.pipeline_kwargs and name in dataset.column_names]
        dataset = dataset.remove_columns(replaced)  # an option sets the rate of all samples
    if pipeline is not None:  # None for code that is not downloaded yet
        prepare_inputs(pipeline, settings, [("--prompts", dataset)], rewards)


def count_prompts_at_once(settings: SampleSettings) -> int:
    """Return how many prompts are sampled and scored before the table is written."""
    return max(1, settings.batch_size // settings.num_generations)


def load_pipeline_to_sample(settings: SampleSettings) -> "DiffusionPipeline":
    """Load the pipeline and its LoRA or trained weights; with the settings of a run as training does."""
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
        load_weights(pipe, settings.lora, component=policy_component(pipe, settings.component))
    place(pipe, settings, device)
    return pipe


def place(pipe: "DiffusionPipeline", settings: SampleSettings, device: torch.device) -> None:
    """Move a pipeline to a device, except for what the settings keep in CPU memory until it is needed."""
    train, offload = settings.train, settings.offload_frozen
    # a run with `cache_prompt_embeds` frees its text encoders; here they are offloaded with the other parts
    if offload is None and train is not None and train.cache_prompt_embeds != "off" and pipe.model_cpu_offload_seq:
        offload = "cpu"
    swaps_blocks = train is not None and train.group_offload is not None
    if offload is None and not swaps_blocks:
        pipe.to(device)
        return
    networks = [getattr(pipe, name) for name in policy_component(pipe, settings.component)]
    for network in networks:
        network.requires_grad_(False)
        if swaps_blocks:
            make_block_swap(train, device).install(network)
        else:
            network.to(device)
    place_frozen_parts(pipe, networks, device, offload)


def write_samples(
    pipe: "DiffusionPipeline",
    dataset: Dataset,
    rewards: list[Reward],
    eval_rewards: list[Reward],
    settings: SampleSettings,
) -> dict[str, tuple[float, float | None]]:
    """Generate and score the samples of all rows, and write their files and the table; return the mean scores."""
    folder, count, total = settings.output_dir, settings.num_generations, len(dataset) * settings.num_generations
    table = pyarrow.parquet.read_table(folder / TABLE).to_pylist() if _count_made(settings) else []
    sampler = Sampler(pipe, settings)
    hashes, plain = hash_rows(dataset), drop_format(dataset)  # in plain rows, media are file names
    hashes += _read_job(settings).get("rows", [])[len(hashes) : len(table) // count]  # of samples beyond these prompts
    write_json(folder / JOB, settings.identity | {"rows": hashes})
    size = count_prompts_at_once(settings) * count
    with tqdm(total=total, initial=min(len(table), total), unit="sample") as bar:
        for first in range(len(table), total, size):
            positions = range(first, min(first + size, total))
            numbers = [position // count for position in positions]
            rows = sampler.inputs.rows(dataset, numbers)
            samples = sampler(rows, positions)
            scores = _score(sampler, rewards + eval_rewards, samples, rows, numbers)
            stems = [folder / f"{position:04d}" for position in positions]
            columns = write_files(samples, stems, folder, sampler.inputs.fps, sampler.sampling_rate)
            columns |= {"seed": [settings.seed + position for position in positions]} | scores
            taken = {*columns, *(COMBINED if settings.reward_funcs else ())}
            for place, number in enumerate(numbers):
                made = {name: values[place] for name, values in columns.items()}
                table.append(_keep_plain_columns(plain[number], taken) | made)
            _write_table(folder, table)
            bar.update(len(positions))
    return _finish(table, total, rewards, eval_rewards, settings)


class Sampler:
    """A sampler of dataset rows, with the pipeline's own scheduler or with the noise of a training rollout."""

    def __init__(self, pipe: "DiffusionPipeline", settings: SampleSettings):
        self.pipe, self.settings, train = pipe, settings, settings.train
        self.inputs, self.sampling_rate = PipelineInputs(pipe, settings), find_sampling_rate(pipe)
        self.overridden = set() if train else set(self.inputs.fixed)  # columns that command-line values replace
        self.policy = None
        if train or settings.noise_level != 0:
            sampling = train.token_sampling if settings.component is not None else None
            self.policy = make_policy(pipe, settings.component, sde_type=settings.sde_type, sampling=sampling)
        pipe.set_progress_bar_config(disable=True)
        if filters := list_filters(pipe):
            logger.warning("Samples are made without %s, as in training.", ", ".join(filters))

    def __call__(self, rows: list[dict[str, Any]], positions: Sequence[int]) -> list[Any]:
        """Generate the samples of `rows`. `positions` are their positions in the whole job."""
        train, samples = self.settings.train, [None] * len(rows)
        rows = [{name: value for name, value in row.items() if name not in self.overridden} for row in rows]
        if train is not None:
            learn_forms(self.inputs, self.policy, rows, train.noise_level or self.policy.default_noise_level, train)
        calls = self.inputs.calls(rows, self.settings.batch_size)
        if train is None and not all(map(self._is_plain, rows)):
            # No trial call has found out how the pipeline reads lists, and some take a list of images for the images
            # of one sample.
            calls = [[index] for call in calls for index in call]
        for call in calls:
            made = self._call([rows[index] for index in call], [positions[index] for index in call])
            for index, sample in zip(call, made, strict=True):
                samples[index] = sample
        return samples

    def _is_plain(self, row: dict[str, Any]) -> bool:
        values = [row[name] for name in self.inputs.accepted & row.keys()]
        return all(value is None or isinstance(value, (str, int, float)) for value in values)

    def _call(self, rows: list[dict[str, Any]], positions: list[int]) -> list[Any]:
        """Call the pipeline with these rows, in the first form that it takes; remember if that is not a batch."""
        inputs, forms = self.inputs.find_given(rows[0]), self.inputs.forms

        def call(form: str) -> list[Any]:
            size = len(rows) if form == BATCHED else 1
            samples: list[Any] = []
            for first in range(0, len(rows), size):
                arguments = self.inputs.arguments(rows[first : first + size], form)
                made = self._sample(arguments, positions[first : first + size])
                self.inputs.check_samples(made, size, arguments)
                samples += made
            return samples

        if inputs in forms:
            return call(forms[inputs].name)
        samples, form = call_in_some_form(call)
        if form.name != BATCHED:
            forms[inputs] = form
            logger.warning("The pipeline takes these samples only one by one (%s).", form.reason)
        return samples

    def _sample(self, inputs: dict[str, Any], positions: list[int]) -> Any:
        """Call the pipeline as it is, or as a rollout does where noise or tokens are drawn."""
        settings, count = self.settings, self.settings.num_generations
        seeds = [settings.seed + position for position in positions]
        # tokens are drawn at random even if the steps after them are noiseless
        if settings.noise_level == 0 and (self.policy is None or not self.policy.draws_tokens):
            arguments = call_arguments(self.pipe, inputs, settings.num_inference_steps, torch.tensor(seeds))
            with family_of(self.pipe).bridged(self.pipe), without_filters(self.pipe):
                return extract_samples(self.pipe, self.pipe(**arguments))
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
        """Choose the steps that draw noise for the sample at each position, as in training; None for all steps."""
        train = self.settings.train
        if train is None or not train.is_noise_limited:
            return None
        plan, prompts = SamplingPlan(train), train.batch_sizes.prompts_per_rollout
        rollouts = [divmod(position // self.settings.num_generations, prompts) for position in positions]
        return [plan.draw_steps(*rollout) for rollout in rollouts]


def _score(
    sampler: Sampler, rewards: list[Reward], samples: list[Any], rows: list[dict], groups: list[int]
) -> dict[str, list]:
    """Score the samples. Return one column per reward, and the columns that rewards add."""
    if not rewards:
        return {}
    extra: dict[str, list] = {}
    kind = "videos" if isinstance(samples[0], list) else "images"
    values = score(
        rewards,
        **{kind: samples},
        prompts=[row["prompt"] for row in rows] if "prompt" in rows[0] else None,
        columns={name: [row[name] for row in rows] for name in rows[0] if name != "prompt"},
        groups=groups,
        fps=sampler.inputs.fps,
        sampling_rate=sampler.sampling_rate,
        log_extra=extra.__setitem__,
        failure_dir=sampler.settings.output_dir / "failures",
    )
    return extra | {reward.name: column for reward, column in zip(rewards, values.T.tolist(), strict=True)}


def _keep_plain_columns(row: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Keep the values of a dataset row that a table can hold. Prefix names in `taken`, e.g. `image`."""
    plain = {name: value for name, value in row.items() if isinstance(value, (str, int, float, bool, type(None)))}
    return {f"input_{name}" if name in taken else name: value for name, value in plain.items()}


def _write_table(folder: Path, table: list[dict[str, Any]]) -> None:
    names = dict.fromkeys(name for row in table for name in row)
    write_table(folder / TABLE, {name: [row.get(name) for row in table] for name in names})


def _finish(
    table: list[dict[str, Any]], size: int, rewards: list[Reward], eval_rewards: list[Reward], settings: SampleSettings
) -> dict[str, tuple[float, float | None]]:
    """Add the combined reward and, if there are groups, the advantage to the table. Return the summary."""
    # an earlier job with more prompts may have left other rows, which are kept as they are
    rows, prompts = table[:size], [row // settings.num_generations for row in range(size)]

    def summarise(name: str) -> tuple[float, float | None]:
        return measure_mean([row.get(name) for row in rows], prompts) or (math.nan, None)

    summary = {reward.name: summarise(reward.name) for reward in rewards + eval_rewards}
    if not rewards:
        return summary
    values = torch.tensor([[row[reward.name] for reward in rewards] for row in rows])
    weights = torch.tensor(reward_weights(rewards, settings.reward_weights))
    how = {name: getattr(settings.train, name) for name in ADVANTAGE_SETTINGS} if settings.train else {}
    if settings.num_generations > 1:
        advantage_fn = load_advantage_fn(settings.train.advantage_fn) if settings.train else None
        result = compute_advantages(values, torch.tensor(prompts), weights, advantage_fn=advantage_fn, **how)
        combined = {"reward": result.rewards, "advantage": result.advantages}
    else:
        aggregation = how.get("multi_objective_aggregation", "sum_then_normalize")
        combined = {"reward": combine(values, weights, aggregation, torch.zeros(size, dtype=torch.long))}
    for name, column in combined.items():
        for row, value in zip(rows, column.tolist(), strict=True):
            row[name] = value
    _write_table(settings.output_dir, table)
    return summary | ({"reward": summarise("reward")} if len(rewards) > 1 else {})
