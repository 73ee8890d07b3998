"""`cpuos audit export`: all entries in a file, added to by the next one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import cpuos
from cpuos.cli import audit
from cpuos.cli.main import main
from cpuos.types.audit import AuditEntry, AuditList, AuditPhase


class Client:
    """A server with so many entries."""

    entries = 5

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def audit(self, *, after: int, limit: int) -> AuditList:
        shown = [entry(number) for number in range(after + 1, self.entries + 1)][:limit]
        more = bool(shown) and shown[-1].id < self.entries
        return AuditList(entries=shown, next_after=shown[-1].id if more else None)


def entry(number: int) -> AuditEntry:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    values: dict[str, Any] = {"workspace": "w", "actor": "a", "action": "file.read", "target": "/ü"}
    return AuditEntry(id=number, at=at, phase=AuditPhase.OUTCOME, **values)


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    monkeypatch.setattr(cpuos, "Client", Client)
    monkeypatch.setattr(Client, "entries", 5)
    monkeypatch.setattr(audit, "PAGE", 2)
    return Client


def ids(file: Path) -> list[int]:
    return [json.loads(line)["id"] for line in file.read_text().splitlines()]


def test_all_entries_and_then_what_has_come_since(
    client: type[Client], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.jsonl"
    assert main(["audit", "export", str(file)]) == 0
    assert capsys.readouterr().err == "5 entries, the last is 5\n"
    assert main(["audit", "export", str(file)]) == 0
    assert capsys.readouterr().err == "no entry has come since\n"
    client.entries = 8
    file.write_bytes(file.read_bytes() + b'{"id":6,"at":"20')  # it was killed while it wrote
    assert main(["audit", "export", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(file), "entries": 3, "last": 8}
    assert ids(file) == list(range(1, 9))
    assert file.stat().st_mode & 0o777 == 0o600


def test_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "export", "-", "--after", "3"]) == 0
    assert [json.loads(line)["id"] for line in capfd.readouterr().out.splitlines()] == [4, 5]


def test_a_file_of_something_else_is_not_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes"
    file.write_text("mine\n")
    assert main(["audit", "export", str(file)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"try: cpuos audit export {tmp_path / 'notes-2'}"
    file.write_text("mine, without an end")
    assert main(["audit", "export", str(file)]) == 2
    assert file.read_text() == "mine, without an end"
    assert main(["audit", "export", str(tmp_path / "none" / "x")]) == 2
    assert "No such file" in capsys.readouterr().err
