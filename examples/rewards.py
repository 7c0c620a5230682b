"""Your own rewards, as the examples use them: plain functions of what the pipeline made."""

import numpy as np

SILENCE = 1e-5  # root mean square below which sound counts as silence, -100 dB


def loudness(completions: list, **columns) -> list[float]:
    """Return minus the distance of each level to -18 dB full scale, in units of 10 dB: 0 is best, silence about -8."""
    levels = [20 * np.log10(max(SILENCE, float(np.sqrt(np.mean(_samples(sound) ** 2))))) for sound in completions]
    return [-abs(level + 18) / 10 for level in levels]


def clipping(completions: list, **columns) -> list[float]:
    """Return the share of samples at or beyond full scale, which a loudspeaker cannot play."""
    return [float(np.mean(np.abs(_samples(sound)) >= 1)) for sound in completions]


def _samples(sound) -> np.ndarray:
    return np.asarray(sound, dtype=np.float64)
