"""What the driver wants of a VMM: a command line for a machine, and a way to ask it how it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from cpuos.runtimes.microvm.launch import Launch

__all__ = ["Drive", "Machine", "Vmm"]


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
    tells_console: bool = False
    """What the guest's kernel says goes to stdout: for a probe."""


class Vmm(Protocol):
    name: ClassVar[str]
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
        """The machine that was launched begins. Raises OSError where the VMM refuses or does not answer."""
        ...

    def overhead_mib(self) -> int:
        """Host memory that it may take beside its guest's."""
        ...

    async def ask_state(self, control: Path, *, timeout_s: float) -> str:
        """`running`, or what it says instead. Raises OSError where nobody answers."""
        ...
