"""What every verb of the node works with."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from cpuos.errors import PlatformError
from cpuos.node.admission import Admission
from cpuos.node.assembly import Assembly
from cpuos.node.journal import Record, Stage
from cpuos.node.kept_templates import KeptTemplates
from cpuos.node.ledger import Ledger
from cpuos.node.packs import PackStore
from cpuos.node.runtime_table import RuntimeTable
from cpuos.node.steps import Checkpoint, Step
from cpuos.node.volume import Volume
from cpuos.runtimes.base import Runtime, SandboxSpec

__all__ = ["Kit"]

log = structlog.get_logger("cpuos.node")

ENDED_UNSEEN = "its process ended while the node daemon was down"


@dataclass(frozen=True, kw_only=True)
class Kit:
    ledger: Ledger
    assembly: Assembly
    runtimes: RuntimeTable
    templates: KeptTemplates
    checkpoint: Checkpoint
    boot_id: str
    admission: Admission
    volume: Volume
    packs: PackStore

    @property
    def max_sandboxes(self) -> int:
        return self.admission.rules.max_sandboxes

    def runtime_of(self, record: Record) -> Runtime:
        runtime = self.runtimes.find(record.request.runtime)
        if runtime is None:
            raise PlatformError(f"cannot reach sandbox: {record.id}", f"no runtime {record.request.runtime!r} here")
        return runtime

    def spec_of(self, record: Record) -> SandboxSpec:
        image = self.templates.image(record.request.template, digest=record.template_digest)
        return self.assembly.spec_of(record, template_image=image, packs=self.packs.mounts(record.request.packs))

    def held_room(self) -> int:
        """How many sandboxes count against `max_sandboxes`: those that have more than files here, and that somebody
        has asked for."""
        uncounted = (Stage.PAUSED, Stage.READY)
        return sum(not (record.ended or record.stage in uncounted) for record in self.ledger.all())

    def end_steps(self, record: Record, *, keep_disk: bool = False) -> list[Step]:
        runtime = self.runtimes.find(record.request.runtime)
        runtimes = [runtime] if runtime is not None else []
        return self.assembly.end_steps(record.id, runtimes=runtimes, keep_disk=keep_disk)

    async def adopt(self, record: Record, runtime: Runtime) -> str:
        """Take over slot and watch of a sandbox that runs. Empty when that is done, else why it cannot be."""
        if record.process is None:
            return ENDED_UNSEEN
        try:
            await self.assembly.slots.readopt(record.id, record.policy)
        except PlatformError as error:
            log.error("network slot not found again", sandbox=record.id, why=error.why)
            return f"its network slot could not be taken up again: {error.why}"
        return "" if await runtime.adopt(self.spec_of(record), record.process) else ENDED_UNSEEN
