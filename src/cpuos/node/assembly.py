"""What one sandbox is made of on this host - work folder, disk, network slot, process tree - and the order in which
these come and go."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from cpuos.node.journal import Record
from cpuos.node.resources import Disks, Slots
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.steps import Step
from cpuos.runtimes.base import Process, Runtime, SandboxSpec
from cpuos.types.network import EffectivePolicy
from cpuos.types.sandbox import SANDBOX_ID_PATTERN

__all__ = ["Assembly"]


class Assembly:
    """Makes and removes the parts of sandboxes. It remembers nothing: every name derives from the sandbox's id."""

    def __init__(
        self,
        *,
        workdirs: Path,
        agent: Path,
        node_public_key: bytes,
        runtimes: RuntimeTable,
        disks: Disks,
        slots: Slots,
    ) -> None:
        self._workdirs = workdirs
        self._agent = agent
        self._node_public_key = node_public_key
        self._runtimes = runtimes
        self.disks = disks
        self.slots = slots
        workdirs.mkdir(mode=0o700, parents=True, exist_ok=True)

    def spec_of(self, record: Record, *, template_image: Path) -> SandboxSpec:
        request = record.request
        return SandboxSpec(
            id=record.id,
            generation=record.generation,
            hostname=request.hostname,
            cpu=request.cpu,
            memory_mib=request.memory_mib,
            disk_mib=request.disk_mib,
            max_processes=request.max_processes,
            template_image=template_image,
            workdir=self._workdirs / record.id,
            disk=self.disks.path(record.id),
            netns=self.slots.path(record.id),
            agent=self._agent,
            node_public_key=self._node_public_key,
        )

    def part_steps(self, spec: SandboxSpec, *, network: EffectivePolicy) -> list[Step]:
        """What must be there before the process; none of these needs another."""

        async def make_disk() -> None:
            await self.disks.create(spec.id, size_mib=spec.disk_mib)

        async def take_slot() -> None:
            await self.slots.take(spec.id, network)

        return [
            Step(name="workdir", do=lambda: self._make_workdir(spec.id), undo=lambda: self._clear_workdir(spec.id)),
            Step(name="disk", do=make_disk, undo=lambda: self.disks.remove(spec.id)),
            Step(name="slot", do=take_slot, undo=lambda: self.slots.release(spec.id)),
        ]

    def start_step(self, spec: SandboxSpec, runtime: Runtime, *, started: Callable[[Process], Awaitable[None]]) -> Step:
        """The process, which needs all other parts; `started` hears of it at once."""

        async def start() -> None:
            await started(await runtime.start(spec))

        return Step(name="start", do=start, undo=lambda: runtime.destroy(spec.id))

    def end_steps(self, sandbox_id: str, *, runtimes: list[Runtime]) -> list[Step]:
        """All parts, the process first. Each step may be repeated and bears "nothing there"."""

        async def destroy() -> None:
            for runtime in runtimes:
                await runtime.destroy(sandbox_id)

        async def release_slot() -> None:
            await self.slots.release(sandbox_id)

        async def remove_disk() -> None:
            await self.disks.remove(sandbox_id)

        return [
            Step(name="destroy", do=destroy),
            Step(name="slot", do=release_slot),
            Step(name="disk", do=remove_disk),
            Step(name="workdir", do=lambda: self._clear_workdir(sandbox_id)),
        ]

    async def leftovers(self) -> set[str]:
        """Ids of all of which anything of this instance is on the host."""
        found = {name for name in os.listdir(self._workdirs) if re.fullmatch(SANDBOX_ID_PATTERN, name)}
        found.update(await self.disks.leftovers(), await self.slots.leftovers())
        for runtime in self._runtimes:
            found.update(await runtime.leftovers())
        return found

    async def _make_workdir(self, sandbox_id: str) -> None:
        (self._workdirs / sandbox_id).mkdir(mode=0o700)

    async def _clear_workdir(self, sandbox_id: str) -> None:
        # rmtree walks by directory handles and follows no link.
        await asyncio.to_thread(shutil.rmtree, self._workdirs / sandbox_id, onerror=_missing_is_fine)


def _missing_is_fine(function: object, path: str, info: tuple[type, BaseException, object]) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]
