"""What one sandbox is made of on this host - work folder, disk, network slot, process tree - and the order in which
these come and go."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from cpuos.errors import CapacityExceeded, PlatformError
from cpuos.node.images import AGENT, DISK, ImageStore, pause_name, root_name
from cpuos.node.journal import Record
from cpuos.node.receipts import DiskReceipts
from cpuos.node.resources import Disks, Slots
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.steps import Step
from cpuos.runtimes.base import Capability, Process, Runtime, SandboxSpec
from cpuos.types.network import EffectivePolicy
from cpuos.types.sandbox import SANDBOX_ID_PATTERN

__all__ = ["Assembly", "RestoreFailed"]


class RestoreFailed(PlatformError):
    """The runtime could not take up what was saved; all else was there."""


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
        images: ImageStore,
    ) -> None:
        self._workdirs = workdirs
        self._agent = agent
        self._node_public_key = node_public_key
        self._runtimes = runtimes
        self.disks = disks
        self.slots = slots
        self.images = images
        self.receipts = DiskReceipts(disks=disks, images=images)
        workdirs.mkdir(mode=0o700, parents=True, exist_ok=True)

    def spec_of(self, record: Record, *, template_image: Path, packs: tuple[tuple[str, Path], ...] = ()) -> SandboxSpec:
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
            agent=self._workdirs / record.id / AGENT,
            node_public_key=self._node_public_key,
            packs=packs,
            own_kernel=self._has_own_kernel(request.runtime),
        )

    def part_steps(
        self, spec: SandboxSpec, *, network: EffectivePolicy, image: Path | None = None, warm: bool = False
    ) -> list[Step]:
        """What must be there before the process; none of these needs another. `image`: the snapshot to begin with,
        `warm`: with its processes."""

        async def make_disk() -> None:
            if spec.own_kernel:
                saved = None if image is None else image / DISK
                await self.disks.hand_over(spec.id, size_mib=spec.disk_mib, image=saved, layer_comes=warm)
            elif image is None:
                await self.disks.create(spec.id, size_mib=spec.disk_mib)
            else:
                await self.disks.create_from(spec.id, image=image / DISK, size_mib=spec.disk_mib)

        async def take_slot() -> None:
            await self.slots.take(spec.id, network, tap=spec.own_kernel)

        return [
            Step(
                name="workdir",
                do=lambda: self._make_workdir(
                    spec.id, agent=image / AGENT if image is not None and warm else self._agent
                ),
                undo=lambda: self._clear_workdir(spec.id),
            ),
            Step(name="disk", do=make_disk, undo=lambda: self.disks.remove(spec.id)),
            Step(name="slot", do=take_slot, undo=lambda: self.slots.release(spec.id)),
        ]

    def unpark_steps(self, spec: SandboxSpec, *, network: EffectivePolicy) -> list[Step]:
        """What a paused sandbox needs before its process; none of these needs another."""
        sandbox_id = spec.id

        async def unpark() -> None:
            await self.disks.unpark(sandbox_id)

        async def take_slot() -> None:
            await self.slots.take(sandbox_id, network, tap=spec.own_kernel)

        return [
            Step(name="disk", do=unpark, undo=lambda: self.disks.park(sandbox_id)),
            Step(name="slot", do=take_slot, undo=lambda: self.slots.release(sandbox_id)),
        ]

    def park_steps(self, sandbox_id: str, *, runtime: Runtime) -> list[Step]:
        """All but files goes, the process first. Each step may be repeated and bears "nothing there"."""
        return [
            Step(name="destroy", do=lambda: runtime.destroy(sandbox_id)),
            Step(name="slot", do=lambda: self.slots.release(sandbox_id)),
            Step(name="disk", do=lambda: self.disks.park(sandbox_id)),
        ]

    def start_step(
        self,
        spec: SandboxSpec,
        runtime: Runtime,
        *,
        started: Callable[[Process], Awaitable[None]],
        memory: Path | None = None,
        root: Path | None = None,
    ) -> Step:
        """The process, which needs all other parts: begun anew, begun with a saved root, or taken up from `memory`.
        `started` hears of it at once."""

        async def start() -> None:
            if memory is not None:
                await started(await _restore(runtime, spec, memory))
            elif root is not None:
                await started(await runtime.start(spec, root=root))
            else:
                await started(await runtime.start(spec))

        return Step(name="start", do=start, undo=lambda: runtime.destroy(spec.id))

    def end_steps(self, sandbox_id: str, *, runtimes: list[Runtime], keep_disk: bool = False) -> list[Step]:
        """All parts; of those on the host the process first. Each step may be repeated and bears "nothing there". With
        `keep_disk` its files stay: the disk, and what was saved of its root."""

        async def destroy() -> None:
            for runtime in runtimes:
                await runtime.destroy(sandbox_id)

        async def remove_images() -> None:
            names = [pause_name(sandbox_id), *([] if keep_disk else [root_name(sandbox_id)])]
            for name in names:
                await asyncio.to_thread(self.images.discard, name)

        disk = self.disks.park if keep_disk else self.disks.remove
        return [
            Step(name="image", do=remove_images),
            Step(name="destroy", do=destroy),
            Step(name="slot", do=lambda: self.slots.release(sandbox_id)),
            Step(name="disk", do=lambda: disk(sandbox_id)),
            Step(name="workdir", do=lambda: self._clear_workdir(sandbox_id)),
        ]

    async def leftovers(self) -> set[str]:
        """Ids of all of which anything of this instance is on the host."""
        found = {name for name in os.listdir(self._workdirs) if re.fullmatch(SANDBOX_ID_PATTERN, name)}
        found.update(await self.disks.leftovers(), await self.slots.leftovers(), self.images.owners())
        for runtime in self._runtimes:
            found.update(await runtime.leftovers())
        return found

    def keep_agent(self, sandbox_id: str, *, to: Path) -> None:
        """Put the agent of this sandbox, which its processes' memory is tied to, into a new folder."""
        _link_agent(self._workdirs / sandbox_id / AGENT, to=to)

    def _has_own_kernel(self, name: str) -> bool:
        runtime = self._runtimes.find(name)
        return runtime is not None and Capability.OWN_KERNEL in runtime.capabilities

    async def _make_workdir(self, sandbox_id: str, *, agent: Path) -> None:
        folder = self._workdirs / sandbox_id
        folder.mkdir(mode=0o700)
        # A name of its own for the agent's file: an upgrade of the agent does not change it for this sandbox.
        _link_agent(agent, to=folder / AGENT)

    async def _clear_workdir(self, sandbox_id: str) -> None:
        # rmtree walks by directory handles and follows no link.
        await asyncio.to_thread(shutil.rmtree, self._workdirs / sandbox_id, onerror=_missing_is_fine)


async def _restore(runtime: Runtime, spec: SandboxSpec, memory: Path) -> Process:
    try:
        return await runtime.restore(spec, image=memory)
    except CapacityExceeded:
        raise
    except PlatformError as error:
        raise RestoreFailed(error.what, error.why, code=error.code, hint=error.hint) from error


def _link_agent(agent: Path, *, to: Path) -> None:
    to.mkdir(mode=0o755, exist_ok=True)
    for file in agent.iterdir() if agent.is_dir() else ():
        try:
            os.link(file, to / file.name)
        except FileExistsError:
            continue
        except OSError:  # on another volume
            shutil.copy2(file, to / file.name)


def _missing_is_fine(function: object, path: str, info: tuple[type, BaseException, object]) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]
