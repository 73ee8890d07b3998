"""The network of a node: one hub, a pool of slots, one slot and one policy for each sandbox.

In the folder, which lies in the node's mount namespace:

    hub            the hub's namespace            block        the addresses it was made for
    N/             slot N: `router` and `guest`   ID.slot      a link to the slot of sandbox ID

The kernel holds everything: a daemon that is killed leaves rules, namespaces and names in place, and the next one opens
them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import structlog

from cpuos.errors import CpuosError, InvalidRequest, NotFound, PlatformError
from cpuos.node.network.block import choose_block, read_routes, taken_addresses
from cpuos.node.network.conntrack import Flow
from cpuos.node.network.hub import Hub
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.maker import SlotRecipe
from cpuos.node.network.plan import BlockPlan, SlotPlan, UplinkKind, host_link
from cpuos.node.network.pool import SlotNumbers, SlotPool
from cpuos.node.network.router import Counters, Router
from cpuos.node.network.slot import arm_slot, guest_name, open_socket, release_slot, router_name
from cpuos.node.network.surroundings import Surroundings, read_surroundings
from cpuos.node.network.taken import TakenSlot
from cpuos.node.network.user_uplink import UserUplink
from cpuos.node.network.worker_set import WorkerConfig, WorkerSet
from cpuos.runtimes.base import AGENT_PORT, GUEST_ADDRESS, GuestLink
from cpuos.types.exceptions import parse_exceptions
from cpuos.types.network import EffectivePolicy
from cpuos.types.sandbox import SANDBOX_ID_PATTERN

__all__ = ["Network", "NetworkConfig"]

log = structlog.get_logger("cpuos.node.network")

HOST_EVERY_S = 5.0
READOPT_TRIES, READOPT_PAUSE_S = 4, 0.25
_SPARE_SLOTS = 16
_LINK = re.compile(rf"({SANDBOX_ID_PATTERN.strip('^$')})\.slot")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """As in the settings, with the folders of the instance."""

    folder: Path
    instance_id: str
    block: str
    uplink: UplinkKind
    exceptions: tuple[str, ...]
    dns_servers: tuple[str, ...]
    pool: int
    max_sandboxes: int
    state_dir: Path
    socket_path: Path
    peer_uids: tuple[int, ...] = ()
    """Who may ask for the record of connections, beside root."""
    limits: NetworkLimits = field(default_factory=NetworkLimits)
    """Of each sandbox."""
    tap_pool: int = 0
    """As `pool`, of slots with a tap."""


class Network:
    """The node's slots, as `Slots` of `cpuos.node.resources` wants them."""

    def __init__(self, config: NetworkConfig) -> None:
        self._config = config
        self._folder = config.folder
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._exemptions = parse_exceptions(config.exceptions)
        resolvers = _parse_resolvers(config.dns_servers)
        self._hub = Hub(
            config.folder, instance_id=config.instance_id, uplink=config.uplink, exemptions=self._exemptions
        )
        self._user_uplink: UserUplink | None = None
        if config.uplink == "user":
            self._user_uplink = UserUplink(self._hub, exemptions=self._exemptions, limits=config.limits)
        self._slots: dict[str, TakenSlot] = {}
        self._surroundings = Surroundings()
        self._watch: asyncio.Task[None] | None = None
        self.workers = WorkerSet(
            WorkerConfig(
                # Without an uplink no question leaves the host either: it would carry out what the guest likes.
                resolvers=resolvers if config.uplink != "none" else (),
                exemptions=self._exemptions,
                state_dir=config.state_dir,
                socket_path=config.socket_path,
                peer_uids=config.peer_uids,
                limits=config.limits,
            ),
            hub=self._hub.path,
            slots=lambda: self._slots,
        )

    # its life

    async def start(self) -> None:
        """Make the hub, or take over that of an earlier daemon, and begin to fill the pool."""
        try:
            self._plan = await asyncio.to_thread(self._open_hub)
            self._surroundings = await asyncio.to_thread(self._look_around)
            if self._user_uplink is not None:
                await self._user_uplink.start(self._plan, self._surroundings.addresses)
            await asyncio.to_thread(self._remove_unused)
        except OSError as problem:
            raise PlatformError("cannot make the sandboxes' network", str(problem), hint="cpuos doctor") from problem
        numbers = SlotNumbers(self._folder, self._plan)
        self.pool = self._make_pool(numbers, size=self._config.pool)
        self.tap_pool = self._make_pool(numbers, size=self._config.tap_pool, tap=True)
        self.workers.start(self._surroundings)
        self.pool.start()
        self.tap_pool.start()
        self._watch = asyncio.create_task(self._watch_host(), name="cpuos-host-network")

    async def close(self) -> None:
        """Let go. What sandboxes may and may not reach stays as it is, but no name is resolved: the forwarder ends."""
        if self._watch is None:
            return  # not started
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        self._watch = None
        await self.pool.close()
        await self.tap_pool.close()
        await self.workers.close()
        if self._user_uplink is not None:
            await self._user_uplink.close()
        await asyncio.gather(*(slot.close() for slot in self._slots.values()))
        self._slots.clear()

    def remove(self) -> None:
        """Take away the hub and what it has on the host; for instances that end for good. Blocks."""
        self._hub.remove()

    # a sandbox's slot

    def path(self, sandbox_id: str) -> Path:
        """The bare namespace, for the runtime; known before the slot is taken."""
        return guest_name(self._link(sandbox_id))

    async def take(self, sandbox_id: str, policy: EffectivePolicy, *, tap: bool = False) -> Path:
        """A slot in which this policy holds, armed, or with a tap. What an earlier try left is replaced."""
        await self.release(sandbox_id)
        try:
            slot = await (self.tap_pool if tap else self.pool).take()
        except OSError as problem:
            raise PlatformError(f"cannot make the network slot of sandbox {sandbox_id}", str(problem)) from problem
        try:
            os.symlink(slot.folder.name, self._link(sandbox_id))
            slot.policy = policy
            self._slots[sandbox_id] = slot
            await self.workers.wait_started()
            # Both come to their end, also when one fails: what they opened is taken back then.
            outcomes = await asyncio.gather(
                slot.apply(policy), self.workers.open(sandbox_id, slot), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await asyncio.shield(self._give_up(sandbox_id, slot))
            raise
        return self.path(sandbox_id)

    async def arm(self, sandbox_id: str) -> None:
        """Give the bare namespace its address again: a sentry takes it away as it starts (network-facts 2)."""
        try:
            await asyncio.to_thread(arm_slot, self._link(sandbox_id))
        except OSError as problem:
            raise PlatformError(f"cannot arm the network slot of sandbox {sandbox_id}", str(problem)) from problem

    async def update(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        """Put a policy in the place of the one before, and cut what it forbids.

        The forwarder first: a name that is not allowed any more is not answered again, and no address learned under the
        old policy gets into the new rules.
        """
        slot = self._taken(sandbox_id)
        async with slot.lock:
            learned = await self.workers.change(sandbox_id, policy)
            await slot.apply(policy, learned=learned)
            cut = await slot.cut()
        await self._end_flows(slot.plan, cut)
        log.info("network policy in place", sandbox=sandbox_id, version=policy.version, connections_cut=len(cut))

    async def open(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        """Put the first policy in force in a slot that let nothing through so far: nothing is open that it may forbid,
        and no name was answered."""
        slot = self._taken(sandbox_id)
        async with slot.lock:
            outcomes = await asyncio.gather(
                slot.apply(policy), self.workers.change(sandbox_id, policy), return_exceptions=True
            )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def readopt(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        """After a restart of the node: open the slot of a running sandbox again, and see that this policy holds.

        Tried a few times: the kernel may be busy with what the daemon before was doing as it died, and a sandbox whose
        slot cannot be taken up is lost.
        """
        if sandbox_id in self._slots:
            return
        for left in reversed(range(READOPT_TRIES)):
            try:
                await self._take_up(sandbox_id, policy)
                return
            except (OSError, PlatformError) as problem:
                log.warning("network slot not taken up yet", sandbox=sandbox_id, why=str(problem), tries_left=left)
                if not left:
                    what = f"cannot take up the network slot of sandbox {sandbox_id}"
                    raise PlatformError(what, str(problem)) from problem
            await asyncio.sleep(READOPT_PAUSE_S)

    async def _take_up(self, sandbox_id: str, policy: EffectivePolicy) -> None:
        folder = self._folder / os.readlink(self._link(sandbox_id))
        router = await asyncio.to_thread(self._open_router, folder)
        slot = self._make_taken(folder, router)
        try:
            await asyncio.to_thread(router.set_surroundings, self._surroundings)
            # An earlier daemon may have had other exceptions, or rules of another version.
            with contextlib.suppress(PlatformError, TypeError):
                slot.counted_before = await slot.counters()
            slot.is_found = True
            await asyncio.to_thread(slot.told.load)
            await slot.apply(policy, base=self._recipe().rules(slot.plan))
            await slot.cut()
        except BaseException:
            await asyncio.shield(slot.close())
            raise
        self._slots[sandbox_id] = slot
        await self.workers.open(sandbox_id, slot)

    async def guest_link(self, sandbox_id: str) -> GuestLink:
        """An unconnected, non-blocking TCP socket made in the router namespace."""
        try:
            made = await asyncio.to_thread(open_socket, self._link(sandbox_id))
        except OSError as problem:
            raise NotFound(
                f"cannot reach sandbox {sandbox_id}", f"it has no network slot: {problem}", code="sandbox_not_found"
            ) from problem
        return GuestLink(socket=made, address=(GUEST_ADDRESS, AGENT_PORT))

    async def counters(self, sandbox_id: str) -> Counters:
        return await self._taken(sandbox_id).counters()

    async def sent_bytes(self) -> dict[str, int]:
        """By sandbox: what its router let out, at the hub's end of its link, where nothing of the guest reaches."""
        devices = {sandbox_id: slot.plan.hub_device for sandbox_id, slot in self._slots.items()}
        received = await asyncio.to_thread(self._hub.received_bytes) if devices else {}
        return {sandbox_id: received.get(device, 0) for sandbox_id, device in devices.items()}

    async def release(self, sandbox_id: str) -> None:
        """Take it away: first what is open in it, for each socket would hold its namespaces (network-facts 5)."""
        link = self._link(sandbox_id)
        slot = self._slots.get(sandbox_id)
        if slot is None and not link.is_symlink():
            return
        with contextlib.suppress(OSError, ValueError):  # half-made, or its hub is gone
            await self._end_flows(self._plan.slot(int(os.readlink(link))))
        await self.workers.shut(sandbox_id, slot)
        if slot is not None:
            await slot.close()
        await asyncio.to_thread(_release_linked, link)
        self._slots.pop(sandbox_id, None)

    async def leftovers(self) -> list[str]:
        """Ids of all sandboxes that have a slot."""
        names = await asyncio.to_thread(os.listdir, self._folder)
        return sorted({match[1] for name in names if (match := _LINK.fullmatch(name))})

    def _link(self, sandbox_id: str) -> Path:
        return self._folder / f"{sandbox_id}.slot"

    def _taken(self, sandbox_id: str) -> TakenSlot:
        slot = self._slots.get(sandbox_id)
        if slot is None:
            raise NotFound(f"cannot find the network slot of sandbox {sandbox_id}", code="sandbox_not_found")
        return slot

    # the hub

    async def _end_flows(self, plan: SlotPlan, flows: Collection[Flow] | None = None) -> None:
        """Of a slot, or those of them that its router cut."""
        if self._user_uplink is not None:
            await self._user_uplink.end(plan.address, flows)
        await asyncio.to_thread(self._hub.end_flows, plan, flows)

    def _open_hub(self) -> BlockPlan:
        config = self._config
        kept = self._hub.kept_block()
        in_use = any(_LINK.fullmatch(name) for name in os.listdir(self._folder))
        needed = config.max_sandboxes + config.pool + _SPARE_SLOTS
        if kept is not None and (in_use or config.block in ("auto", str(kept))):
            if config.block not in ("auto", str(kept)):
                log.warning("network block kept while sandboxes use it", block=str(kept), wanted=config.block)
            block = kept
        else:
            link = host_link(config.instance_id)
            taken = taken_addresses(read_routes(), own_link=link, exemptions=self._exemptions)
            block = choose_block(config.block, taken=taken, slots=needed)
        plan = BlockPlan(network=block)
        self._hub.open(plan)
        return plan

    def _make_pool(self, numbers: SlotNumbers, *, size: int, tap: bool = False) -> SlotPool[TakenSlot]:
        return SlotPool(
            partial(self._recipe, tap=tap),
            size=size,
            numbers=numbers,
            prepare=self._prepare,
            discard=self._discard,
        )

    def _recipe(self, *, tap: bool = False) -> SlotRecipe:
        return SlotRecipe(
            folder=self._folder,
            hub=self._hub.path,
            block=self._plan.network,
            exemptions=self._exemptions,
            surroundings=self._surroundings,
            limits=self._config.limits,
            tap=tap,
        )

    async def _prepare(self, number: int) -> TakenSlot:
        folder = self._folder / str(number)
        return self._make_taken(folder, await asyncio.to_thread(self._open_router, folder))

    async def _give_up(self, sandbox_id: str, slot: TakenSlot) -> None:
        await self.workers.shut(sandbox_id, slot)
        await self._discard(slot)
        self._link(sandbox_id).unlink(missing_ok=True)
        self._slots.pop(sandbox_id, None)

    async def _discard(self, slot: TakenSlot) -> None:
        await slot.close()
        await asyncio.to_thread(release_slot, slot.folder)

    def _open_router(self, folder: Path) -> Router:
        return Router.open(router_name(folder), exemptions=self._exemptions)

    def _make_taken(self, folder: Path, router: Router) -> TakenSlot:
        return TakenSlot(folder=folder, plan=self._plan.slot(int(folder.name)), router=router)

    def _remove_unused(self) -> None:
        """Slots that an earlier daemon had ready, or was making: nothing was ever in them."""
        used = set()
        for name in os.listdir(self._folder):
            if _LINK.fullmatch(name):
                with contextlib.suppress(OSError):
                    used.add(os.readlink(self._folder / name))
        for name in os.listdir(self._folder):
            if name.isdigit() and name not in used:
                release_slot(self._folder / name)

    async def _watch_host(self) -> None:
        """Keep to the host's own addresses, which no sandbox reaches, and its ways out, as they come and go."""
        followed = True
        while True:
            await asyncio.sleep(HOST_EVERY_S)
            try:
                seen = await asyncio.to_thread(self._look_around)
                if seen == self._surroundings and followed:
                    continue
                self._surroundings, followed = seen, False
                if self._user_uplink is not None:
                    await self._user_uplink.set_host_addresses(seen.addresses)
                log.info("host network changed", addresses=[*map(str, seen.addresses)], reach=[*map(str, seen.reach)])
                await asyncio.gather(*(slot.set_surroundings(seen) for slot in list(self._slots.values())))
                await self.workers.set_surroundings(seen)
                await self.pool.drain()
                await self.tap_pool.drain()
                followed = True
            except (OSError, CpuosError):
                log.exception("host network not followed yet")

    def _look_around(self) -> Surroundings:
        is_down = self._user_uplink is not None and self._user_uplink.is_down
        uplink = "none" if is_down else self._config.uplink
        seen = read_surroundings(uplink, own_link=host_link(self._config.instance_id))
        self._hub.set_host_addresses(self._plan, seen.addresses)
        return seen


def _release_linked(link: Path) -> None:
    """The slot, then the link that makes it a sandbox's: what fails half-way still has an owner."""
    with contextlib.suppress(FileNotFoundError):
        name = os.readlink(link)
        if name.isdigit():
            release_slot(link.parent / name)
    link.unlink(missing_ok=True)


def _parse_resolvers(texts: tuple[str, ...]) -> tuple[IPv4Address, ...]:
    try:
        found = tuple(IPv4Address(text) for text in texts)
    except ValueError as error:
        raise InvalidRequest("cannot read dns_servers", str(error), hint='dns_servers = ["1.1.1.1"]') from error
    if not found:
        raise InvalidRequest("cannot read dns_servers", "the list is empty", hint='dns_servers = ["1.1.1.1"]')
    return found
