"""One real slot with its router's rules, and an outside that owns every address there is. No route leaves it.

    guest (bare) ── lan :router: wan ── u0 :outside

The outside takes the place of the hub and keeps none of its rules: what is not refused in the router arrives.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Self, TypeVar

from cpuos.node.network.judge import Judge
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.namespaces import in_fresh_thread, inside, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.plan import HUB_MAC, LAN, WAN_MAC, BlockPlan
from cpuos.node.network.router import Router
from cpuos.node.network.rules import PEEK_PORT, base_rules
from cpuos.node.network.slot import guest_name, make_slot, release_slot, router_name
from cpuos.node.network.surroundings import Surroundings
from cpuos.node.network.tap import open_tap
from cpuos.types.blocked import Exemption
from cpuos.types.network import EffectivePolicy
from packets import Packet, ethernet, read_packet, udp_frame

T = TypeVar("T")
PLAN = BlockPlan(network=IPv4Network("10.231.0.0/20")).slot(0)
AMPLE = NetworkLimits(
    concurrent_connections=60000,
    new_connections_per_s=100000,
    new_connections_burst=100000,
    pings_per_s=100000,
    names_per_s=100000,
    names_burst=100000,
)
"""No cap is met."""
_OUTSIDE_RULES = """\
table ip outside {
  set served { type inet_service; }
  chain input {
    type filter hook input priority filter; policy drop;
    tcp dport @served accept
    udp dport @served accept
  }
}
"""
"""It answers only where a test has a server: what the guest hears is from the router, then."""
_EVERY_PROTOCOL = 3  # linux/if_ether.h: ETH_P_ALL
_MARKER = 0x88B5  # for local experiments
_DEADLINE_S = 20.0


def judge(*layers: Any, version: int = 1) -> Judge:
    """Of policies as a caller writes them."""
    origins = ["workspace", "sandbox"] if len(layers) > 1 else ["sandbox"]
    listed = [{"origin": origins[min(n, 1)], "policy": policy} for n, policy in enumerate(layers)]
    return Judge(EffectivePolicy.model_validate({"version": version, "layers": listed}))


class TapEnd:
    """A VMM's end of a tap, used as a packet socket is: all that it reads came out of the router."""

    def __init__(self, name: str) -> None:
        self._descriptor = open_tap(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # no frame at all: refused before it is one
            os.write(self._descriptor, frame)

    def recv(self, size: int) -> bytes:
        return os.read(self._descriptor, size)

    def recvfrom(self, size: int) -> tuple[bytes, tuple[str, int, int]]:
        return self.recv(size), ("", 0, socket.PACKET_HOST)


class RouterWorld:
    def __init__(self, folder: Path, router: Router, *, tap: bool = False) -> None:
        self.router = router
        self.address = PLAN.address
        self.outside_path = folder / "outside"
        self.guest_path = guest_name(folder / "slot")
        self.router_path = router_name(folder / "slot")
        self._opened = contextlib.ExitStack()
        self._outside = self._opened.enter_context(self.in_outside(lambda: packet_socket(PLAN.hub_device)))
        guest = self.in_guest(lambda: TapEnd(LAN) if tap else packet_socket("eth0"))
        self._guest = self._opened.enter_context(guest)
        self._wan = self._opened.enter_context(self.in_router(lambda: packet_socket("wan")))
        self.names = self._opened.enter_context(self.in_router(_names_socket))
        """Where the forwarder would listen."""
        self.peek = self._opened.enter_context(
            self.in_router(lambda: socket.create_server(("10.0.0.1", PEEK_PORT), backlog=4096))
        )
        """Where the peek would listen."""

    def close(self) -> None:
        self._opened.close()

    def in_outside(self, work: Callable[[], T]) -> T:
        return inside(self.outside_path, work)

    def in_guest(self, work: Callable[[], T]) -> T:
        return inside(self.guest_path, work)

    def in_router(self, work: Callable[[], T]) -> T:
        return inside(self.router_path, work)

    def apply(self, *layers: Any, version: int = 1, **named: Any) -> Judge:
        made = judge(*layers, version=version)
        self.router.apply(made, **named)
        return made

    def fresh(self) -> None:
        """Nothing captured yet, no connection known."""
        self.router.cut(judge("off"), lambda address: ())
        for one in (self._outside, self._guest, self._wan):
            _drain(one)

    def send(self, *frames: bytes) -> None:
        """Written by something in the place of the sentry."""
        for frame in frames:
            self._guest.send(frame)

    def settle(self) -> None:
        """Until all that was sent is judged, and has arrived outside where it was let through."""
        word = os.urandom(8)
        _drain(self.names)
        self.send(udp_frame("10.0.0.1", 53, payload=word, source_port=5353))
        deadline = time.monotonic() + _DEADLINE_S
        while self.names.recv(4096) != word:
            assert time.monotonic() < deadline
        self._wan.send(ethernet(word, kind=_MARKER, source=WAN_MAC, target=HUB_MAC))
        self._word = word

    def arrived(self) -> list[Packet]:
        """What the outside got of all that was sent."""
        self.settle()
        packets = []
        while True:
            frame = _next(self._outside)
            if frame[12:14] == _MARKER.to_bytes(2, "big") and frame[14:22] == self._word:
                return packets
            packet = read_packet(frame)
            assert packet, f"no IPv4: {frame.hex()}"
            packets.append(packet)

    def heard(self) -> list[Packet]:
        """All that has come to the guest."""
        self.settle()
        packets = []
        while select.select([self._guest], [], [], 0.05)[0]:
            frame, origin = self._guest.recvfrom(65536)
            packet = read_packet(frame)
            if packet and origin[2] != socket.PACKET_OUTGOING:
                packets.append(packet)
        return packets

    def answers(self, count: int) -> list[Packet]:
        """What came back to the guest: `count` refusals, or as many as there are."""
        found: list[Packet] = []
        with contextlib.suppress(TimeoutError):
            while len(found) < count:
                packet = read_packet(_next(self._guest, deadline_s=0.5))
                if packet and packet.answer:
                    found.append(packet)
        return found

    def guest_socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        made = self.in_guest(lambda: socket.socket(socket.AF_INET, kind))
        made.settimeout(_DEADLINE_S)
        return made

    def connect(self, address: str, port: int) -> str:
        """What a program in the guest hears."""
        with self.guest_socket() as made:
            try:
                made.connect((address, port))
            except OSError as problem:
                return type(problem).__name__ if problem.errno is None else os.strerror(problem.errno)
            return "connected"

    @contextlib.contextmanager
    def server(self, port: int) -> Iterator[list[socket.socket]]:
        """An echo outside, on every address; gives the connections that it has."""
        listener = self.in_outside(lambda: socket.create_server(("0.0.0.0", port), backlog=512))
        self.in_outside(lambda: _load(f"add element ip outside served {{ {port} }}"))
        taken: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = listener.accept()
                    taken.append(one)
                    threading.Thread(target=_echo, args=(one,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield taken
        finally:
            self.in_outside(lambda: _load(f"delete element ip outside served {{ {port} }}"))
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()
            for one in taken:
                one.close()


@contextlib.contextmanager
def router_world(
    folder: Path,
    *,
    limits: NetworkLimits = AMPLE,
    exemptions: Collection[Exemption] = (),
    surroundings: Surroundings | None = None,
    tap: bool = False,
) -> Iterator[RouterWorld]:
    """With `tap` the guest is a VMM: it has no namespace, and no program runs in its place."""
    outside = folder / "outside"
    with contextlib.ExitStack() as made:
        made.callback(release_namespace, outside)
        made.callback(release_slot, folder / "slot")
        in_fresh_thread(lambda: _keep_new(outside))
        surroundings = surroundings or Surroundings()
        rules = base_rules(PLAN, limits=limits, exemptions=exemptions, surroundings=surroundings)
        make_slot(folder / "slot", PLAN, hub=outside, load_rules=lambda plan: _load(rules), tap=tap)
        inside(outside, _own_every_address)
        router = Router.open(router_name(folder / "slot"), exemptions=exemptions)
        made.callback(router.close)
        router.set_surroundings(surroundings)
        world = RouterWorld(folder, router, tap=tap)
        made.callback(world.close)
        yield world


def _load(rules: str) -> None:
    context = NftContext()
    try:
        context.run(rules)
    finally:
        context.close()


def _keep_new(path: Path) -> None:
    os.close(new_namespace())
    keep_namespace(path)


def _own_every_address() -> None:
    commands = f"""\
link set lo up
route add {PLAN.address}/32 dev {PLAN.hub_device} table local
route add local 0.0.0.0/0 dev lo table local
"""
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    _load(_OUTSIDE_RULES)


def packet_socket(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    made.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
    made.bind((device, _EVERY_PROTOCOL))
    return made


def _names_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("10.0.0.1", 53))
    made.settimeout(_DEADLINE_S)
    return made


def _next(one: socket.socket | TapEnd, *, deadline_s: float = _DEADLINE_S) -> bytes:
    """The next frame that came in."""
    while select.select([one], [], [], deadline_s)[0]:
        frame, origin = one.recvfrom(65536)
        if origin[2] != socket.PACKET_OUTGOING:
            return frame
    raise TimeoutError("no frame came")


def _drain(one: socket.socket | TapEnd) -> None:
    while select.select([one], [], [], 0)[0]:
        one.recv(65536)


def _echo(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            one.sendall(data)
