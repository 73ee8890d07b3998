"""The model of the random lifecycle operations reads what it is shown."""

from __future__ import annotations

import pytest

from chaos_boxes import Seen


@pytest.mark.parametrize("count", ["", "7"])
@pytest.mark.parametrize("workspace", [{}, {"f-a-1": "11"}, {"f-a-1": "11", "f-a-2": "22"}])
@pytest.mark.parametrize("home", [{}, {"f-a-3": "33"}, {"f-a-1": "11", "f-a-3": "33"}])
def test_files_are_of_the_place_where_they_were_seen(
    count: str, workspace: dict[str, str], home: dict[str, str]
) -> None:
    """A file that is half written outside of /workspace is not one of /workspace, however little else is there."""
    places = ["".join(f"{digest}  {name}\n" for name, digest in place.items()) for place in (workspace, home)]
    seen = Seen.read(f"1\ncame to {count}\n{places[0]}\n{places[1]}")
    assert (seen.counters, seen.count) == ("1", int(count) if count else None)
    assert (seen.workspace, seen.home) == (workspace, home)
