"""What one figure measured, and how two interleaved series are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Measured", "block_ratios", "compare_rates", "compare_times", "pair_ratios", "percentile"]

_BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure of one run. `spread` is the lowest and highest value that parts of the run alone would have given."""

    value: float
    spread: tuple[float, float]
    detail: dict[str, Any] = field(default_factory=dict)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare_times(product: Sequence[float], bare: Sequence[float]) -> Measured:
    """Product's p50 over the bare one's; times in seconds, taken in turns."""
    return Measured(
        value=statistics.median(product) / statistics.median(bare),
        spread=block_ratios(product, bare),
        detail={
            "n": len(product),
            "p90_ratio": round(percentile(product, 0.9) / percentile(bare, 0.9), 2),
            "product_ms": _times(product),
            "bare_ms": _times(bare),
        },
    )


def compare_rates(product: Sequence[float], bare: Sequence[float], *, size_bytes: int) -> Measured:
    """Product's median rate over the bare one's; times in seconds for `size_bytes`, taken in turns."""
    return Measured(
        value=statistics.median(bare) / statistics.median(product),
        spread=pair_ratios(bare, product),
        detail={
            "n": len(product),
            "product_mb_s": round(size_bytes / 1e6 / statistics.median(product)),
            "bare_mb_s": round(size_bytes / 1e6 / statistics.median(bare)),
        },
    )


def block_ratios(product: Sequence[float], bare: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest ratio of medians over consecutive fifths of the run."""
    size = max(1, len(product) // _BLOCKS)
    ratios = [
        statistics.median(product[start : start + size]) / statistics.median(bare[start : start + size])
        for start in range(0, size * (len(product) // size), size)
    ]
    return min(ratios), max(ratios)


def pair_ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest ratio of two neighbours."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return min(ratios), max(ratios)


def _times(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(1e3 * statistics.median(values), 2), "p90": round(1e3 * percentile(values, 0.9), 2)}
