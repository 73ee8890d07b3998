"""A node keeps its name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cpuos.node.facts import read_name


def test_a_host_that_is_renamed_is_the_same_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    assert read_name(tmp_path / "name") == "first"
    monkeypatch.setattr(socket, "gethostname", lambda: "second")
    assert read_name(tmp_path / "name") == "first"
