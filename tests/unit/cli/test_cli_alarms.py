"""cpuos alarms, and alarms where sandboxes are listed and made."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from cpuos import Sandbox
from cpuos.cli.main import main
from cpuos.client._sync.alarms import AlarmAccess
from cpuos.types.alarms import ActiveAlarm, AlarmRule, WorkspaceAlarms
from cpuos.types.sandbox import Sandbox as SandboxInfo

RULE, OTHER = "cpu=90%/10m", "sent=5GiB/1h:pause"


@pytest.fixture(autouse=True)
def _configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUOS_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CPUOS_API_KEY", "cpk_x")


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The workspace's rules on a server."""
    held = {"rules": [OTHER]}

    def get(access: AlarmAccess) -> WorkspaceAlarms:
        return WorkspaceAlarms(rules=held["rules"], installation=[RULE])

    def update(access: AlarmAccess, rules: list[str]) -> WorkspaceAlarms:
        held["rules"] = list(rules)
        return get(access)

    monkeypatch.setattr(AlarmAccess, "get", get)
    monkeypatch.setattr(AlarmAccess, "update", update)
    return held


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What `cpuos ls` is answered."""

    def answer(**values: Any) -> None:
        common = {
            "id": "a" * 20,
            "workspace": "w",
            "state": "running",
            "template": "python",
            "labels": {},
            "name": None,
        }
        sizes = {"cpu": 1, "memory_mib": 512, "disk_mib": 64, "max_processes": 64, "timeout_s": 900}
        info = SandboxInfo(**common, **sizes, created_at=datetime.now(UTC), **values)
        monkeypatch.setattr(Sandbox, "list", lambda **_: [info])

    return answer


def test_the_workspaces_rules_are_shown_with_the_installations(workspace, capsys) -> None:
    assert main(["alarms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [["installation", RULE], ["workspace", OTHER]]
    assert main(["alarms", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rules"] == [AlarmRule.model_validate(OTHER).model_dump(mode="json")]


def test_they_are_replaced_and_taken_away(workspace) -> None:
    assert main(["alarms", "--set", RULE, "--set", OTHER]) == 0
    assert workspace["rules"] == [RULE, OTHER]
    assert main(["alarms", "--off"]) == 0
    assert workspace["rules"] == []


@pytest.mark.parametrize(
    "arguments", [["box", "--set", RULE], ["box", "--off"], ["--off", "--set", RULE]], ids=["set", "off", "both"]
)
def test_what_cannot_be_meant_is_refused(workspace, capsys, arguments) -> None:
    assert main(["alarms", *arguments]) == 2
    assert capsys.readouterr().err.startswith("cannot ")
    assert workspace["rules"] == [OTHER]


def test_a_list_shows_what_is_used_too_much(listed, capsys) -> None:
    active = ActiveAlarm(origin="workspace", rule=RULE, since=datetime.now(UTC))
    listed(active_alarms=[active, active.model_copy(update={"origin": "sandbox"})])
    assert main(["ls"]) == 0
    assert f"running: alarm {RULE}  " in capsys.readouterr().out
    listed()
    assert main(["ls"]) == 0
    assert "running  " in capsys.readouterr().out
