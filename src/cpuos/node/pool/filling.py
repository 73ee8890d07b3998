"""One ready sandbox is made: as in a create, but under an id of the node's own, reaching nothing, and until its agent
listens."""

from __future__ import annotations

import asyncio
import secrets
import string
from dataclasses import replace
from functools import partial

import structlog

from cpuos.errors import PlatformError
from cpuos.node.images import MEMORY, Manifest
from cpuos.node.journal import Record, Stage
from cpuos.node.kit import Kit
from cpuos.node.lives import Lives
from cpuos.node.pool.shape import Shape
from cpuos.node.refusals import incompatible
from cpuos.node.saving import check_room_to_restore
from cpuos.node.steps import Step, Together, UndoFailed, run_steps
from cpuos.runtimes.base import Process, Runtime
from cpuos.types.node import NodeSandboxCreate, Restored

__all__ = ["Filling"]

log = structlog.get_logger("cpuos.node")

AGENT_S = 20.0
# While a sandbox boots, a SYN into its not yet living link is lost: better a new one than TCP's retry after 1 s.
_CONNECT_S = 0.1
_POLL_S = 0.01
_ID_LETTERS = string.ascii_lowercase + string.digits


class Filling:
    def __init__(self, kit: Kit, *, lives: Lives) -> None:
        self._kit = kit
        self._ledger = kit.ledger
        self._lives = lives

    async def fill(self, shape: Shape) -> Record:
        """Ready when this returns. After a failure nothing of it is left."""
        runtime, probe = await self._kit.runtimes.get(shape.runtime)
        saved = await self._read(shape, runtime=runtime) if shape.snapshot is not None else None
        sandbox_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(20))
        record = Record(
            request=NodeSandboxCreate(
                id=sandbox_id,
                generation=1,
                template=shape.template,
                runtime=shape.runtime,
                hostname=sandbox_id,
                cpu=shape.cpu,
                memory_mib=shape.memory_mib,
                disk_mib=shape.disk_mib,
                max_processes=shape.max_processes,
                snapshot=shape.snapshot,
            ),
            stage=Stage.CREATING,
            boot_id=self._kit.boot_id,
            changed_at=self._ledger.clock(),
            session_key=secrets.token_hex(32),
            template_digest=shape.template_digest,
            isolation=probe.isolation,
            isolation_detail=probe.detail,
        )
        if saved is not None:
            record = record.becomes(
                Stage.CREATING,
                restored=Restored.MEMORY,
                restored_at=saved.created_at,
                incarnation=1,
                thaw=saved.freeze,
                thaw_from=saved.sandbox,
            )
        self._ledger.begin(record)
        try:
            async with self._ledger.lock(sandbox_id):
                await run_steps("fill", self._steps(record, saved), checkpoint=self._kit.checkpoint)
                ready = self._ledger.find(sandbox_id)
                assert ready is not None
                self._lives.watch(ready, runtime)
                return ready
        except UndoFailed:
            # What is left on the host has an owner until the sweeper has removed it.
            await self._ledger.keep(record.becomes(Stage.DELETING, exit_reason="it was not made ready"))
            raise

    async def _read(self, shape: Shape, *, runtime: Runtime) -> Manifest:
        """The snapshot's manifest, once it is proved to be good and to fit. It may go at any time: then this fails."""
        assert shape.snapshot is not None
        saved = await asyncio.to_thread(self._kit.assembly.images.read, shape.snapshot)
        what = f"cannot make a sandbox ready from snapshot {shape.snapshot}"
        has_template = self._kit.templates.has(saved.template, digest=saved.template_digest)
        incompatible(what, saved, has_template=has_template, runtime=runtime)
        return saved

    def _steps(self, record: Record, saved: Manifest | None) -> list[Step | Together]:
        kit, spec = self._kit, replace(self._kit.spec_of(record), idly=True)
        running = record

        async def started(process: Process) -> None:
            nonlocal running
            now = self._ledger.clock()
            running = record.becomes(Stage.READY, process=process, started_at=now, changed_at=now)

        # As in a create, nothing is waited for on its way to the volume.
        recorded = Step(
            name="record",
            do=lambda: self._ledger.keep(record, sync=False),
            undo=lambda: self._ledger.forget(record.id),
        )
        image = kit.assembly.images.path(saved.name) if saved is not None else None
        memory = image / MEMORY if image is not None else None
        parts = kit.assembly.part_steps(spec, network=record.policy, image=image, warm=image is not None)
        start: list[Step] = [kit.assembly.start_step(spec, kit.runtime_of(record), started=started, memory=memory)]
        if saved is not None:
            room = partial(check_room_to_restore, kit, saved, verb="create", sandbox_id=record.id)
            parts.append(Step(name="room", do=room))
            # What was taken up is frozen until somebody tells it who it is, which nobody does before this has ended.
            check = partial(asyncio.to_thread, kit.assembly.images.check, saved.name, folders=[MEMORY])
            start.append(Step(name="check", do=check))
        return [
            Together(steps=[recorded, *parts]),
            Together(steps=start),
            Step(name="agent", do=lambda: self._agent_listens(record.id)),
            Step(name="ready", do=lambda: self._ledger.keep(running, sync=False)),
        ]

    async def _agent_listens(self, sandbox_id: str) -> None:
        """It takes a connection. Nothing is said: this process reads no byte that a guest wrote."""
        loop = asyncio.get_running_loop()
        until = loop.time() + AGENT_S
        while True:
            link = await self._kit.assembly.slots.guest_link(sandbox_id)
            with link.socket:
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        await loop.sock_connect(link.socket, link.address)
                    return
                except (OSError, TimeoutError) as problem:
                    if loop.time() >= until:
                        what = f"cannot make sandbox ready: {sandbox_id}"
                        raise PlatformError(what, f"its agent did not listen within {AGENT_S:g} s") from problem
            await asyncio.sleep(_POLL_S)
