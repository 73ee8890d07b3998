"""The process that chooses which guest process dies when a sandbox's memory is full. Run as `python -m`, unprivileged.

A dump of all guest processes is made by the guest as it likes: names, arguments and environments, up to hundreds of
megabytes. So it is never read by the node (root). This worker gets a connected control socket and an answer socket for
each question, and says a few numbers. It drops its rights before the first question; each question has a process of its
own, with limits on memory and time, so a hostile sandbox holds up nobody else's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time

__all__ = ["choose_victim", "main"]

_MAX_DUMP = 24 << 20
_MAX_MEMORY = 768 << 20
_ANSWER_S = 1.5
_MAX_ANCESTORS = 64
_NOBODY = 65534
_REQUEST = b'{"method":"containerManager.ProcfsDump","arg":{}}'


def choose_victim(dump: bytes) -> list[int]:
    """The guest process with the most resident memory, never PID 1, and its ancestors; nothing when there is none.

    Raises ValueError on anything unexpected.
    """
    answer = json.loads(dump)
    if not isinstance(answer, dict) or answer.get("success") is not True or not isinstance(answer.get("result"), list):
        raise ValueError("not a dump")
    best, best_size = 0, 0
    parents: dict[int, int] = {}
    for process in answer["result"]:
        status = process.get("status") if isinstance(process, dict) else None
        if not isinstance(status, dict):
            continue
        pid, size = status.get("pid"), status.get("vm_rss", 0)
        if type(pid) is not int or type(size) is not int or not 1 < pid < 1 << 31:
            continue
        parents[pid] = status.get("ppid", 0)
        if size > best_size:
            best, best_size = pid, size
    line: list[int] = []
    while best in parents and best not in line and len(line) <= _MAX_ANCESTORS:
        line.append(best)
        best = parents[best]
    return line


def main() -> None:
    """Serve questions from the socket that is file descriptor `argv[1]` until the node goes away."""
    questions = socket.socket(fileno=int(sys.argv[1]))
    json.loads("{}")  # nothing is left to load once the rights are gone
    _drop_rights()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        message, descriptors, _, _ = socket.recv_fds(questions, 1, 2)
        if not message:
            return
        if len(descriptors) == 2 and os.fork() == 0:
            status = 1
            try:
                questions.close()
                _answer(socket.socket(fileno=descriptors[0]), socket.socket(fileno=descriptors[1]))
                status = 0
            finally:
                os._exit(status)
        for descriptor in descriptors:
            os.close(descriptor)


def _answer(control: socket.socket, answer: socket.socket) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    signal.alarm(int(_ANSWER_S + 1))
    deadline = time.monotonic() + _ANSWER_S
    control.settimeout(_ANSWER_S)
    control.sendall(_REQUEST)
    control.shutdown(socket.SHUT_WR)
    chunks, size = [], 0
    while True:
        control.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = control.recv(1 << 18)
        if not chunk:
            break
        size += len(chunk)
        if size > _MAX_DUMP:
            raise ValueError("the dump is too big")
        chunks.append(chunk)
    line = choose_victim(b"".join(chunks))
    answer.sendall(" ".join(map(str, line)).encode() or b"nobody")


def _drop_rights() -> None:
    os.chdir("/")
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


if __name__ == "__main__":
    main()
