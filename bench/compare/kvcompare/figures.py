"""Medians, spreads, slopes, shares: everything that is only arithmetic."""

import math
import statistics

# A block whose probes differ by more says little: the machine changed meanwhile.
MOST_DRIFT = 0.10
# Of all CPUs, used by other programs during a run. Two threads that wait for
# each other by spinning lose far more to a third than it takes.
MOST_OTHERS = 0.05


def token_ids(count: int, run: int) -> list[int]:
    """Ordinary ids; those of two runs share no beginning."""
    return [(i * 7919 + run) % 40000 + 100 for i in range(count)]


def spread(values: list[float]) -> dict:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile: a value that was measured."""
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]


def slope(values: list[float]) -> float:
    """Of the least-squares line through (0, values[0]), (1, values[1]), ..."""
    mean_x = (len(values) - 1) / 2
    mean_y = statistics.fmean(values)
    over = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    return over / sum((x - mean_x) ** 2 for x in range(len(values)))


def smooth(values: list[float], width: int) -> list[tuple[float, float]]:
    """(middle, median) of each run of `width` values; a shorter end counts too."""
    points = []
    for start in range(0, len(values), width):
        part = values[start : start + width]
        points.append((start + (len(part) - 1) / 2, statistics.median(part)))
    return points


def drift(before: dict, after: dict) -> float:
    """The largest relative difference of two probes of the machine."""
    return max(
        abs(before[key] - after[key]) / max(before[key], after[key])
        for key in ("read_gb_s", "gflop_s")
    )


def marks(before: dict, after: dict, others: float) -> list[str]:
    """Why the figures of a block should not be trusted; empty: no reason."""
    found = []
    changed = drift(before, after)
    if changed > MOST_DRIFT:
        found.append(f"probes differ by {changed:.0%}")
    if others > MOST_OTHERS:
        found.append(f"others used {others:.0%} of the CPUs")
    return found


def roofline_share(
    tokens_per_second: float,
    weight_bytes: float,
    kv_bytes_per_token: float,
    mean_length: float,
    read_gb_s: float,
) -> float:
    """Of the read bandwidth: bytes of weights and of K/V that a token needs."""
    bytes_read = weight_bytes + kv_bytes_per_token * mean_length
    return bytes_read * tokens_per_second / (read_gb_s * 1e9)


def agreement(tokens: list[int], reference: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    for i, (token, wanted) in enumerate(zip(tokens, reference)):
        if token != wanted:
            return i
    return min(len(tokens), len(reference))


def log_prob_difference(ours: list[float], theirs: list[float]) -> dict:
    """Mean and largest absolute difference of log-probabilities."""
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "mean": statistics.fmean(differences),
        "max": max(differences),
        "tokens": len(differences),
    }
