"""Where a daemon's log lines go. A log that cannot be written, on a full disk say, never fails what it tells about."""

from __future__ import annotations

import json
import os
import threading

__all__ = ["LogStream"]


class LogStream:
    """A text file for loggers over a descriptor; lines that could not be written are counted in the next that could."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._lost = 0

    def write(self, text: str) -> int:
        with self._lock:
            data = (self._told_loss() + text).encode("utf-8", "backslashreplace")
            try:
                written = os.write(self._descriptor, data)
            except OSError:
                written = -1
            self._lost = 0 if written == len(data) else self._lost + 1
        return len(text)

    def _told_loss(self) -> str:
        if not self._lost:
            return ""
        return "\n" + json.dumps({"event": "log lines lost", "level": "warning", "count": self._lost}) + "\n"

    def flush(self) -> None:
        """Nothing is held back."""
