"""When the counters of a router are worth a look: all that went unlogged is found, and quiet ones cost nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpuos.node.network.records.floods import EVERY_S, SUSPECT, Floods

BURST, PER_S = 50, 20


def test_a_quiet_sandbox_is_never_looked_at():
    floods = Floods()
    for second in range(100):
        if second % 10 == 0:
            floods.logged("a")
        assert floods.due(second / 100) == []


def test_a_flood_is_looked_at_at_once_and_then_until_it_is_over():
    floods = Floods()
    for _ in range(SUSPECT):
        floods.logged("a")
    assert floods.due(0.0) == ["a"]
    assert floods.due(EVERY_S / 2) == []
    assert floods.due(EVERY_S) == ["a"], "many were logged before: the log may have been at its end"
    floods.suspect("a")
    assert floods.due(2 * EVERY_S) == ["a"], "something was missing"
    assert floods.due(3 * EVERY_S) == []
    assert floods.due(100.0) == []


def test_what_has_ended_is_not_looked_at():
    floods = Floods()
    floods.suspect("a")
    floods.forget("a")
    assert floods.due(1.0) == []


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 120)), max_size=40))
def test_whatever_goes_unlogged_is_looked_at_within_moments(spells):
    """Against the kernel's own allowance: (milliseconds of pause, packets at once)."""
    floods, level, now, unlogged_since = Floods(), float(BURST), 0.0, None
    for pause_ms, packets in [*spells, *[(250, 0)] * 20]:
        for _ in range(max(1, pause_ms // 250)):
            step = pause_ms / 1000 / max(1, pause_ms // 250)
            now += step
            level = min(BURST, level + step * PER_S)
            if floods.due(now):
                if unlogged_since is not None:
                    floods.suspect("a")  # as the book does, which finds them missing
                unlogged_since = None
        for _ in range(packets):
            if level >= 1:
                level -= 1
                floods.logged("a")
            elif unlogged_since is None:
                unlogged_since = now
        assert unlogged_since is None or now - unlogged_since <= EVERY_S + 3.1
    assert unlogged_since is None
