"""What the driver wants of a VMM: a command line for a machine, and a way to ask it how it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from cpuos.runtimes.microvm.launch import Launch

__all__ = ["Drive", "Machine", "Memory", "Vmm"]


class Memory(StrEnum):
    """What the guest's memory is."""

    OWN = "own"
    """The VMM's own."""
    SHARED = "shared"
    """The file that it is handed: what the guest writes is in it."""
    PRIVATE = "private"
    """A copy on write of the file that it is handed, which stays as it is."""


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A block device of the guest: an open file, always taken as raw bytes."""

    name: str
    """By which the guest knows it; at most 20 letters."""
    descriptor: int
    writable: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One virtual machine. Numbers are descriptors that the VMM inherits."""

    kernel: str
    initrd: str
    """Paths in the jail."""
    arguments: str
    """Of the kernel, and behind ` -- ` of its first process."""
    cpu: int
    memory_mib: int
    drives: tuple[Drive, ...] = ()
    tap: int | None = None
    guest_mac: str = ""
    control: int | None = None
    """A listening socket, by which the driver asks it."""
    memory: Memory = Memory.OWN
    saved: Path | None = None
    """The state of a saved one, which it goes on from."""
    tells_console: bool = False
    """What the guest's kernel says goes to stdout: for a probe."""


class Vmm(Protocol):
    name: ClassVar[str]
    saves_files: ClassVar[bool]
    """It writes state and memory by itself, to what it was given at its start: `Launch.saves`."""
    program: Path
    kvm: bool

    def version(self) -> str:
        """As the program says it; raises OSError where it does not start."""
        ...

    def command(self, machine: Machine) -> list[str]:
        """What tells this way of running the machine from any other."""
        ...

    def launch(self, plan: Launch, machine: Machine, *, control: Path | None = None) -> tuple[int, int]:
        """Start it in its jail: its process number, and a descriptor of what it says. `control` is where it will be
        asked. Raises OSError."""
        ...

    async def boot(self, control: Path, machine: Machine) -> None:
        """The machine that was launched begins, or goes on from what was saved. Raises OSError where the VMM refuses or
        does not answer."""
        ...

    def identity(self, machine: Machine) -> str:
        """Of the machine that the guest sees: a saved one is taken up only by one of the same."""
        ...

    def overhead_mib(self) -> int:
        """Host memory that it may take beside its guest's."""
        ...

    async def ask_state(self, control: Path, *, timeout_s: float) -> str:
        """`running`, or what it says instead. Raises OSError where nobody answers."""
        ...

    def save(
        self, control: Path, target: int, *, memory: bool, also: Callable[[], None], limit_bytes: int, timeout_s: float
    ) -> None:
        """Write the machine's state while it stands still, with its `memory` or without, and do what else is to be done
        in this moment. It runs on, also after a failure. It blocks. Raises OSError."""
        ...

    def go_on(self, control: Path, *, timeout_s: float) -> None:
        """Who was to save it has died, and it stands still: it runs. Running is fine. It blocks. Raises OSError."""
        ...
