"""What a template starts in each new sandbox, and the wait until it is ready."""

from __future__ import annotations

import asyncio

from cpuos.errors import PlatformError
from cpuos.server.templates.failures import output_end
from cpuos.server.templates.guest import Guest
from cpuos.types.template import TemplateInfo

__all__ = ["READY_S", "begin"]

READY_S = 60.0


async def begin(guest: Guest, template: TemplateInfo) -> None:
    """Run the template's `start` in a new sandbox, and return when its `ready` is fulfilled."""
    if template.start is None:
        return
    image = template.image
    user, folder, shell = ("root", "/workspace", "bash") if image is None else (image.user, image.folder, image.shell)
    command_id = await guest.start(template.start, name="/tmp/.cpuos-start", cwd=folder, user=user, shell=shell)
    if template.ready is None:
        return
    port = int(template.ready.partition(":")[2])
    started = asyncio.create_task(guest.wait(command_id))
    listening = asyncio.create_task(guest.wait(await guest.await_port(port, wait_s=READY_S, shell=shell)))
    try:
        await asyncio.wait({started, listening}, return_when=asyncio.FIRST_COMPLETED)
        if started.done() and started.result().exit_code == 0:
            await listening  # it has left a server behind, or will
        if listening.done() and listening.result().exit_code == 0:
            return
    finally:
        for task in (started, listening):
            task.cancel()
        await asyncio.gather(started, listening, return_exceptions=True)
    end = await output_end(guest, command_id)
    how = "it has ended" if started.done() and not started.cancelled() else f"{READY_S:g} s have passed"
    raise PlatformError(
        f"cannot start what template {template.name!r} starts",
        f"nothing listens on port {port} and {how}; the end of its output: {end}",
        hint=f"cpuos template inspect {template.name}",
        code="start_not_ready",
        details={"port": port, "output": end},
    )
