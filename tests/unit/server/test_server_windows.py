"""What was used within a window, against the whole truth of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.server.windows import Window

LENGTH = 600.0


def told(window: Window, *samples: tuple[float, float]) -> list[float]:
    return [window.add(at, total) for at, total in samples]


@pytest.mark.parametrize(
    ("samples", "used"),
    [
        pytest.param([(0, 5)], 0, id="what was used before the first look is not counted"),
        pytest.param([(0, 0), (10, 7)], 7, id="less than a window: all of it"),
        pytest.param([(0, 0), (600, 60)], 60, id="a whole window"),
        pytest.param([(0, 0), (600, 600), (1200, 600)], 0, id="a window of nothing"),
        pytest.param([(0, 0), (6000, 600)], 60, id="nobody looked for ten windows: the mean of them"),
        pytest.param([(0, 0), (300, 300), (310, 2)], 0, id="the total went back: it begins anew"),
        pytest.param([(900, 0), (1200, 300), (10, 400)], 0, id="the clock went back: it begins anew"),
        pytest.param([(0, 0), (300, 300), (310, 2), (320, 9)], 7, id="and counts from there"),
        pytest.param([(5, 1), (5, 1), (5, 3)], 2, id="several looks at one moment"),
    ],
)
def test_used(samples: list[tuple[float, float]], used: float) -> None:
    assert told(Window(LENGTH), *samples)[-1] == pytest.approx(used)


rates = st.lists(st.tuples(st.floats(0.5, 40), st.sampled_from([0.0, 0.1, 1.0, 2.0, 50.0])), min_size=1, max_size=400)


@given(rates)
def test_it_is_between_a_somewhat_shorter_and_a_somewhat_longer_window(steps: list[tuple[float, float]]) -> None:
    """Looks at most 40 s apart. Never more than was used in the window and what lies between two samples before it."""
    window, at, total = Window(LENGTH), 0.0, 0.0
    history = [(at, total)]
    window.add(at, total)
    for step_s, rate in steps:
        at, total = at + step_s, total + step_s * rate
        history.append((at, total))
        used = window.add(at, total)
        longer = total - max(value for moment, value in history if moment <= max(0.0, at - LENGTH - 52))
        shorter = total - max(value for moment, value in history if moment <= max(0.0, at - LENGTH + 41))
        assert used <= longer + 1e-6
        assert used >= shorter * LENGTH / (LENGTH + 52) - 1e-6


@given(rates, st.floats(0.5, 60))
def test_a_steady_rate_is_met_exactly_however_often_one_looks(steps: list[tuple[float, float]], rate: float) -> None:
    window, at = Window(LENGTH), 0.0
    window.add(0, 0)
    for step_s, _ in steps:
        at += step_s
        assert window.add(at, at * rate) == pytest.approx(min(at, LENGTH) * rate, rel=1e-6)


def test_it_keeps_few_samples() -> None:
    window = Window(86400)
    for second in range(0, 200_000, 5):
        window.add(second, second)
    assert len(window._samples) <= 62
