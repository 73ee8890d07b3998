"""Pages of the gateway's journal: each entry once, and what was given is not read again."""

from __future__ import annotations

import json
from pathlib import Path

from cpuos.gateway.journal import Journal, JournalPage
from cpuos.gateway.tickets import Ticket

TICKET = Ticket(
    id="t", workspace="w", sandbox="s", generation=1, actor="a", scope=frozenset(), issued_at=0, expires_at=0
)


def write(journal: Journal, count: int) -> None:
    for _ in range(count):
        journal.intent(TICKET, "command.start", target="c", detail={})


def numbers(page: JournalPage) -> list[int]:
    return [json.loads(line)["seq"] for line in page.lines]


def test_pages_follow_each_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.page(0, limit=100) == JournalPage(lines=[], next=0)
    write(journal, 10)
    assert numbers(journal.page(0, limit=4)) == [1, 2, 3, 4]
    assert numbers(journal.page(4, limit=100)) == [5, 6, 7, 8, 9, 10]
    assert journal.page(10, limit=100) == JournalPage(lines=[], next=10)
    write(journal, 1)
    assert numbers(journal.page(10, limit=100)) == [11]
    assert numbers(journal.page(3, limit=2)) == [4, 5]
    assert numbers(journal.page(0, limit=100)) == list(range(1, 12))
    journal.close()


def test_what_was_given_is_not_read_again(tmp_path: Path) -> None:
    """A reader that asks often costs what is new, not what a segment holds."""
    journal = Journal(tmp_path / "journal")
    write(journal, 10)
    assert journal.page(0, limit=100).next == 10
    (segment,) = (tmp_path / "journal").glob("*.jsonl")
    size = segment.stat().st_size
    with segment.open("r+b") as file:
        file.write(b" " * size)
    write(journal, 2)
    assert numbers(journal.page(10, limit=100)) == [11, 12]
    journal.close()
