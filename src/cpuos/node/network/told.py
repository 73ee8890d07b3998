"""What a guest was told of names: which addresses they stand for, and until when that opens anything.

The forwarder keeps it for its own work and dies with the daemon; this is what the next forwarder and the next daemon
begin with, so that a program which goes on with an address is not refused for a restart that it knows nothing of.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

from cpuos.node.network.policy_rules import NamedAddress

__all__ = ["ToldNames", "names_file", "remove_names_file"]

_MOST = 2048
"""Pairs of name and address: as many as the forwarder keeps."""
_SPARE_LINES = 512
_LINE = re.compile(rb"(\d{1,12}) ([a-z0-9_.-]{1,253}) ([0-9.]{7,15})\n")


def names_file(folder: Path) -> Path:
    return folder / "names"


def remove_names_file(folder: Path) -> None:
    for path in (names_file(folder), _partial(folder)):
        path.unlink(missing_ok=True)


class ToldNames:
    """Of one slot; in memory, and in a file beside it once something was told. A line is `MOMENT NAME ADDRESS`, of the
    clock that goes on over a restart of the daemon, and not over one of the host: neither do slots."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._until: OrderedDict[tuple[str, IPv4Address], float] = OrderedDict()
        self._names: dict[IPv4Address, dict[str, None]] = {}
        self._lines = 0

    def add(self, told: Iterable[NamedAddress]) -> None:
        """The newest last; beyond the most, the oldest are forgotten."""
        now = self._clock()
        for entry in told:
            key = (entry.name, entry.address)
            self._until[key] = max(self._until.pop(key, 0.0), now + entry.ttl_s)
            self._names.setdefault(entry.address, {})[entry.name] = None
        while len(self._until) > _MOST:
            (name, address), _ = self._until.popitem(last=False)
            self._names[address].pop(name)
            if not self._names[address]:
                del self._names[address]

    def all(self) -> list[NamedAddress]:
        """Oldest first; with no seconds left where it opens nothing any more."""
        now = self._clock()
        return [
            NamedAddress(name=name, address=address, ttl_s=max(0, int(until - now)))
            for (name, address), until in self._until.items()
        ]

    def by_address(self) -> dict[IPv4Address, tuple[str, ...]]:
        """Under which names the guest was told each address."""
        return {address: tuple(names) for address, names in self._names.items()}

    def save(self, told: Iterable[NamedAddress]) -> None:
        """Write down what was just added. Blocks, for a moment."""
        keys = [(entry.name, entry.address) for entry in told if (entry.name, entry.address) in self._until]
        if not keys:
            return
        if self._lines + len(keys) > len(self._until) + _SPARE_LINES:
            self.save_all()
            return
        with names_file(self._folder).open("ab") as file:
            file.write(self._written(keys))
        self._lines += len(keys)

    def save_all(self) -> None:
        """Write the file anew. Blocks, for a moment."""
        if not self._until and not self._lines:
            return
        partial = _partial(self._folder)
        partial.write_bytes(self._written(self._until))
        os.replace(partial, names_file(self._folder))
        self._lines = len(self._until)

    def load(self) -> None:
        """What an earlier daemon saved; what cannot be read was not told."""
        with contextlib.suppress(FileNotFoundError):
            for moment, name, address in _LINE.findall(names_file(self._folder).read_bytes()):
                self._lines += 1
                with contextlib.suppress(AddressValueError):
                    left = int(int(moment) - self._clock())
                    told = NamedAddress(name=name.decode(), address=IPv4Address(address.decode()), ttl_s=max(0, left))
                    self.add([told])

    def _written(self, keys: Iterable[tuple[str, IPv4Address]]) -> bytes:
        return b"".join(f"{int(self._until[key])} {key[0]} {key[1]}\n".encode() for key in keys)


def _partial(folder: Path) -> Path:
    return folder / "names.new"
