"""Network slots without a node: for tests of runtimes. They let nothing out, and no worker serves them."""

from __future__ import annotations

import asyncio
import os
from ipaddress import IPv4Network
from pathlib import Path

from cpuos.node.network.hub import Hub
from cpuos.node.network.maker import SlotRecipe
from cpuos.node.network.plan import BlockPlan
from cpuos.node.network.slot import arm_slot, guest_name, open_socket, release_slot
from cpuos.runtimes.base import AGENT_PORT, GUEST_ADDRESS, GuestLink

__all__ = ["LooseSlots"]

_BLOCK = IPv4Network("10.231.0.0/20")


class LooseSlots:
    """Slots by number in one folder; `close` removes what they have in common."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hub = Hub(folder, instance_id="000000", uplink="none")
        self._recipe = SlotRecipe(folder=folder, hub=self._hub.path, block=_BLOCK)
        self._lock = asyncio.Lock()

    def path(self, sandbox_id: str) -> Path:
        return guest_name(self._place(sandbox_id))

    async def take(self, sandbox_id: str) -> Path:
        async with self._lock:
            if self._hub.kept_block() is None:
                await asyncio.to_thread(self._hub.open, BlockPlan(network=_BLOCK))
        await asyncio.to_thread(self._recipe.make, self._number(sandbox_id))
        return self.path(sandbox_id)

    async def arm(self, sandbox_id: str) -> None:
        await asyncio.to_thread(arm_slot, self._place(sandbox_id))

    async def guest_link(self, sandbox_id: str) -> GuestLink:
        made = await asyncio.to_thread(open_socket, self._place(sandbox_id))
        return GuestLink(socket=made, address=(GUEST_ADDRESS, AGENT_PORT))

    async def release(self, sandbox_id: str) -> None:
        """With the last one the hub goes."""
        await asyncio.to_thread(release_slot, self._place(sandbox_id))
        if not await self.leftovers():
            self.close()

    async def leftovers(self) -> list[str]:
        return sorted(name for name in os.listdir(self._folder) if name.isdigit())

    def close(self) -> None:
        self._hub.remove()
        (self._folder / "block").unlink(missing_ok=True)

    def _number(self, sandbox_id: str) -> int:
        return int(sandbox_id, 36) % 4000

    def _place(self, sandbox_id: str) -> Path:
        return self._folder / str(self._number(sandbox_id))
