"""How many experts of a layer are critical: DyMoE's schedule by depth, equations 4 and 5."""

import math

import numpy as np

ROUNDING = 1e-9  # tolerance of ratio * demanded, so that 0.7 of 10 is 7 although the floating-point product is slightly larger


def retention_of(layer: int, layers: int, mean: float) -> float:
    """Share of the demanded experts of MoE layer `layer` of `layers` that are critical (equation 4).

    `mean` is the mean over all layers, 0.5 to 1; the paper's lambda is 2 mean - 1. The first layer keeps all, the last lambda.
    """
    if layers == 1:
        return mean
    least = 2 * mean - 1
    return (1 - least) * (math.cos(math.pi * layer / (layers - 1)) + 1) / 2 + least


def ratios_of(layers: int, mean: float, schedule: str) -> list[float]:
    """The share of each layer: by depth (`cosine`), or `mean` everywhere (`equal`)."""
    return [retention_of(layer, layers, mean) if schedule == "cosine" else mean for layer in range(layers)]


def critical_count(ratio: float, demanded: int) -> int:
    """How many of `demanded` experts are critical: ceil(ratio * demanded) (equation 5)."""
    return min(demanded, math.ceil(ratio * demanded - ROUNDING))


def critical_counts(ratio: float | np.ndarray, demanded: np.ndarray) -> np.ndarray:
    """As `critical_count` for arrays, int64."""
    return np.minimum(demanded, np.ceil(ratio * demanded - ROUNDING).astype(np.int64))
