"""A log that cannot be written fails nobody, and says afterwards how much it lost."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import structlog

from cpuos.logstream import LogStream


def test_a_full_disk_fails_nobody(capfd) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = LogStream(full)
        logger = structlog.WriteLoggerFactory(stream)()
        logger.msg("x" * 10_000)
        handler = logging.StreamHandler(stream)
        handler.emit(logging.LogRecord("a", logging.ERROR, "f", 1, "text \ud800", (), None))
    finally:
        os.close(full)
    assert capfd.readouterr().err == ""


def test_lost_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    full, log = os.open("/dev/full", os.O_WRONLY), os.open(path, os.O_WRONLY | os.O_CREAT)
    place = os.dup(full)
    stream = LogStream(place)
    for _ in range(3):
        stream.write("lost\n")
    os.dup2(log, place)
    stream.write("kept\n")
    stream.write("later\n")
    for descriptor in (full, log, place):
        os.close(descriptor)
    _, lost, kept, later = path.read_text().splitlines()
    assert json.loads(lost)["count"] == 3
    assert (kept, later) == ("kept", "later")
