"""How a worker gives up its rights, and how the node sees that it has.

It starts as root, because the interpreter may lie where nobody else can read, loads what it needs and gives up all
rights before it reads its first message. The node says nothing before /proc shows that it did.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["USER", "Confinement", "confinement_of", "is_locked_down", "lock_down"]

USER = "cpuos-network"
_SPARE_USER = "nobody"

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 23, 24, 38
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What a worker may use; on its command line as JSON."""

    uid: int
    gid: int
    parent: int
    """The node's process id: the worker ends with it."""
    memory_mib: int
    descriptors: int

    def fields(self) -> dict[str, int]:
        return asdict(self)


def confinement_of(*, memory_mib: int, descriptors: int) -> Confinement:
    """For a worker of this process: the system user of the network workers, or nobody where there is none."""
    try:
        entry = pwd.getpwnam(USER)
    except KeyError:
        entry = pwd.getpwnam(_SPARE_USER)
    uid, gid = (entry.pw_uid, entry.pw_gid) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    return Confinement(uid=uid, gid=gid, parent=os.getpid(), memory_mib=memory_mib, descriptors=descriptors)


def lock_down(confinement: Confinement) -> None:
    """Give up everything, for good. Raises OSError when one of it fails."""
    os.chdir("/")
    os.umask(0o077)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, confinement.memory_mib << 20)
    _limit(resource.RLIMIT_NOFILE, confinement.descriptors)
    _limit(resource.RLIMIT_NPROC, 0)  # neither process nor thread
    if os.geteuid() == 0:
        number = 0
        while _prctl(_PR_CAPBSET_READ, number, may_fail=True) >= 0:
            _prctl(_PR_CAPBSET_DROP, number)
            number += 1
        os.setgroups([])
        os.setresgid(confinement.gid, confinement.gid, confinement.gid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # After the change of user, which clears it.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != confinement.parent:
        raise SystemExit("the node is gone")


def is_locked_down(pid: int, confinement: Confinement) -> bool:
    """The kernel's word on a child that is still there."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    own = os.geteuid() != 0
    return (
        fields["Uid"].split() == [str(confinement.uid)] * 4
        and fields["Gid"].split() == [str(confinement.gid)] * 4
        and (own or not fields["Groups"].split())
        and fields["NoNewPrivs"].strip() == "1"
        and all(int(fields[name], 16) == 0 for name in _CAPABILITIES if not (own and name == "CapBnd"))
    )


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _prctl(option: int, value: int, *, may_fail: bool = False) -> int:
    result = _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)
    if result < 0 and not may_fail:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl {option}")
    return int(result)


_libc = ctypes.CDLL(None, use_errno=True)
