"""Means over samples, with standard errors over prompts."""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable


def measure_mean(values: Iterable[float | None], prompts: Iterable[Hashable]) -> tuple[float, float | None] | None:
    """Return the mean of samples and its standard error, which counts the samples of a prompt as one observation.

    Samples of a prompt share its difficulty, so they are not independent evidence of the mean over other prompts.

    Examples:
        >>> measure_mean([0.0, 0.0, 1.0, 1.0], ["cat", "cat", "dog", "dog"])
        (0.5, 0.5)
        >>> measure_mean([1.0, 2.0], ["cat", "cat"])
        (1.5, None)
    """
    found: dict[Hashable, list[float]] = defaultdict(list)
    for value, prompt in zip(values, prompts, strict=True):
        if value is not None and not math.isnan(value):
            found[prompt].append(value)
    if not found:
        return None
    mean = statistics.fmean(value for own in found.values() for value in own)
    if len(found) == 1:
        return mean, None
    return mean, statistics.stdev(map(statistics.fmean, found.values())) / math.sqrt(len(found))
