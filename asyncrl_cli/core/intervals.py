"""Confidence intervals of means over prompts (decision 0094).

Responses to the same prompt are not independent, so each prompt is a cluster of values. A mean is over all values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

LEVEL = 0.05
"""The probability with which noise alone counts as a difference."""
Z = NormalDist().inv_cdf(1 - LEVEL / 2)
"""Standard errors on each side of an interval of 95 %."""

Interval = tuple[float, float]
Clusters = Sequence[Sequence[float]]


def wilson(share: float, count: float) -> Interval:
    """Wilson's score interval of a share measured on ``count`` independent cases (at least 1)."""
    n = max(1.0, count)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def clustered_error(clusters: Clusters) -> tuple[float, float]:
    """The mean of all values and its cluster-robust standard error.

    With x_ij the value j of cluster i, and N values: sqrt(sum_i (sum_j (x_ij - mean))^2) / N (Miller 2024,
    arXiv:2411.00640, section 2.2).
    """
    count = sum(map(len, clusters))
    mean = math.fsum(value for cluster in clusters for value in cluster) / count
    squares = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters)
    return mean, math.sqrt(squares) / count


def share_interval(clusters: Clusters, answers: int | None = None) -> Interval:
    """The 95 % interval of the mean of values between 0 and 1: Wilson's interval for the effective number of cases.

    This number is p (1 - p) / error^2 for the mean p, and at most the number of ``answers`` behind the values (by
    default one for each value). If all values are 0 or all are 1, it is the number of clusters. With one value per
    cluster, each 0 or 1, it is the number of values, as in Wilson's own interval (Korn and Graubard 1998; Dean and
    Pagano 2015).
    """
    mean, error = clustered_error(clusters)
    mean = min(1.0, max(0.0, mean))
    spread, max_cases = mean * (1 - mean), float(answers or sum(map(len, clusters)))
    if len(clusters) == 1 or not spread:
        return wilson(mean, len(clusters))
    return wilson(mean, min(max_cases, spread / error**2) if error else max_cases)


def mean_interval(clusters: Clusters) -> Interval | None:
    """The 95 % interval of the mean of any values, by Student's t; None with fewer than 5 clusters.

    It assumes a nearly normal mean, so it is too narrow with few prompts and rare, large values.
    """
    freedom = len(clusters) - 1
    if freedom < 4:
        return None
    # The quantile of Student's t within 2 % (Abramowitz and Stegun 26.7.5).
    t = Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
    mean, error = clustered_error(clusters)
    half = t * error * math.sqrt(1 + 1 / freedom)
    return mean - half, mean + half
