"""The runner and the README tell of the same figures with the same goals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.figures import FIGURES
from benchmarks.results import block_ratios, compare_rates, compare_times, percentile

README = Path(__file__).parents[3] / "benchmarks" / "README.md"


def _rows() -> dict[str, str]:
    """Goal of each figure that the README's table names."""
    rows = {}
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows.update(dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[-1]))
    return rows


def test_readme_and_runner_have_the_same_figures() -> None:
    assert list(_rows()) == [figure.name for figure in FIGURES]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_goal_in_the_readme_is_the_one_that_is_kept(figure) -> None:
    goal = _rows()[figure.name]
    assert ("≥" in goal) == figure.at_least
    assert float(re.search(r"[\d.]+", goal[re.search(r"[≤≥]", goal).end() :])[0]) == figure.limit


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_meets_its_limit_and_no_more(figure) -> None:
    worse = figure.limit * (0.99 if figure.at_least else 1.01)
    assert figure.is_met(figure.limit)
    assert not figure.is_met(worse)


def test_times_compare_by_medians_and_tell_their_spread() -> None:
    product, bare = [0.002] * 80 + [0.004] * 20, [0.001] * 100
    found = compare_times(product, bare)
    assert found.value == 2.0
    assert found.spread == (2.0, 4.0)
    assert found.detail["n"] == 100
    assert found.detail["p90_ratio"] == 4.0


def test_rates_are_higher_when_times_are_shorter() -> None:
    found = compare_rates([2.0, 2.0, 4.0], [1.0, 1.0, 1.0], size_bytes=100_000_000)
    assert found.value == 0.5
    assert found.spread == (0.25, 0.5)
    assert found.detail == {"n": 3, "product_mb_s": 50, "bare_mb_s": 100}


def test_few_values_make_few_blocks() -> None:
    assert block_ratios([1.0, 3.0], [1.0, 1.0]) == (1.0, 3.0)
    assert percentile([1.0], 0.9) == 1.0
