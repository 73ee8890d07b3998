"""Unix sockets on which the node, or one of its workers, serves."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["listen"]

BACKLOG = 128


def listen(path: Path, *, kind: socket.SocketKind, mode: int, gid: int | None) -> socket.socket:
    """A listening unix socket with exactly this mode and group; a dead one of an earlier daemon is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))  # the umask has taken all rights of others until here
        if gid is not None:
            os.chown(path, -1, gid)
        os.chmod(path, mode)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
