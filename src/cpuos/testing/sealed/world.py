"""The sealed host and the fake internet, joined by one link and to nothing else."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Self, TypeVar

from cpuos.node.network.hub import Hub
from cpuos.node.network.namespaces import inside
from cpuos.node.network.netlink import RouteNetlink
from cpuos.node.network.plan import BlockPlan, SlotPlan
from cpuos.testing.sealed.addresses import HOST, HOST_GATEWAY
from cpuos.testing.sealed.instance import SealedInstance
from cpuos.testing.sealed.slot import SealedSlot
from cpuos.types.blocked import Exemption

__all__ = ["FakeNames", "Packet", "SealedWorld", "Seen"]

T = TypeVar("T")
_HOST_MAC, _INTERNET_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
_BLOCK = IPv4Network("10.231.0.0/20")
_INSTANCE = "5ea1ed"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A connection, or a datagram, that a server of the fake internet took."""

    at: float
    protocol: str
    """http, tls, mail, tcp, dns or udp."""
    server: str
    """The address that was asked for."""
    port: int
    client: str
    client_port: int
    sni: str | None
    host: str | None
    path: str | None
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Packet:
    """Anything that arrived on the internet's end of the host's link."""

    protocol: str
    source: str
    destination: str
    port: int | None


class SealedWorld:
    """Made and ended by `with`. Nothing of it outlives this process, however that ends."""

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        try:
            self._host_process = self._stack.enter_context(_Child("cpuos.testing.sealed.host"))
            self._internet_process = self._stack.enter_context(_Child("cpuos.testing.sealed.internet"))
            self._join()
            self._internet_process.ask(op="serve", device="eth0")
            self.assert_sealed()
        except BaseException:
            self._stack.close()
            raise
        self.names = FakeNames(self._internet_process)
        self._slots_made = 0
        self._lock = threading.Lock()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # places

    @property
    def host(self) -> Path:
        """The host's network namespace."""
        return self._host_process.namespace

    @property
    def internet(self) -> Path:
        return self._internet_process.namespace

    def in_host(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread in the host's namespace; sockets it makes stay there."""
        return inside(self.host, work)

    def run_in_host(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", f"--net={self.host}", "--", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    # what is inside

    @contextlib.contextmanager
    def slot(
        self, *, load_rules: Callable[[SlotPlan], None] | None = None, hub: Hub | None = None
    ) -> Iterator[SealedSlot]:
        """A slot on a hub of its own kind, with native programs in the guest's place.

        `load_rules` runs inside the router. Without it the router lets everything pass, as if it had been overcome.
        """
        with self._lock:
            hub = hub or self.hub
            self._slots_made += 1
            plan = BlockPlan(network=_BLOCK).slot(self._slots_made)
        slot = SealedSlot(self._folder / str(plan.number), plan, hub=hub.path, load_rules=load_rules)
        with slot:
            yield slot

    @cached_property
    def hub(self) -> Hub:
        """The hub of slots without an instance, joined to the host."""
        return self.make_hub()

    def make_hub(self, *, exemptions: Sequence[Exemption] = ()) -> Hub:
        """The same hub, with the exemptions given."""
        hub = Hub(self._folder, instance_id=_INSTANCE, uplink="nat", exemptions=exemptions)
        self.in_host(lambda: hub.open(BlockPlan(network=_BLOCK)))
        self._stack.callback(lambda: self.in_host(hub.remove))
        return hub

    @contextlib.contextmanager
    def instance(self, *, runtime: str = "gvisor", **values: Any) -> Iterator[SealedInstance]:
        """A whole installation whose daemons live on the sealed host; client and CLI reach it from here."""
        made = SealedInstance(
            netns=self.host, forward=self._forward, runtime=runtime, **{"network_uplink": "nat", **values}
        )
        with made:
            yield made

    # the fake internet

    @cached_property
    def authority(self) -> bytes:
        """The certificate (PEM) that clients of its TLS servers must trust."""
        return base64.b64decode(self._internet_process.ask(op="authority"))

    def connections(self) -> list[Seen]:
        return [Seen(**_only(Seen, row)) for row in self._internet_process.ask(op="connections")]

    def packets(self) -> list[Packet]:
        """Every packet that left the host, whether or not anything answered."""
        return [Packet(**row) for row in self._internet_process.ask(op="packets")]

    def clear(self) -> None:
        """Forget connections, packets and queries so far."""
        self._internet_process.ask(op="clear")

    def serve_folder(self, folder: Path | None) -> None:
        """Let every HTTP and TLS server give out the files of a folder: a package mirror."""
        self._internet_process.ask(op="docroot", folder=str(folder) if folder else "")

    # its seal

    def assert_sealed(self) -> None:
        """No device, route or namespace of this machine's own network is inside."""
        own = os.stat("/proc/self/ns/net").st_ino
        places = {"host": self.host, "internet": self.internet}
        assert len({own, *(path.stat().st_ino for path in places.values())}) == 3, "the namespaces are not apart"
        allowed = {"host": {"lo", "eth0"}, "internet": {"lo", "eth0"}}
        for name, path in places.items():
            devices = {device for _, device in inside(path, socket.if_nameindex)}
            ours = {device for device in devices if device.startswith("cpuos")}
            assert devices - ours == allowed[name], f"{name} has devices {devices}"
            assert {route.device for route in inside(path, _routes)} <= devices

    def _join(self) -> None:
        def at_host() -> None:
            namespace = os.open(self.internet, os.O_RDONLY | os.O_CLOEXEC)
            with RouteNetlink() as host:
                try:
                    host.add_veth("eth0", mac=_HOST_MAC, peer="eth0", peer_mac=_INTERNET_MAC, peer_netns=namespace)
                finally:
                    os.close(namespace)
                host.set_address("eth0", f"{HOST}/24")
                host.set_up("eth0")

        def at_internet() -> None:
            with RouteNetlink() as internet:
                internet.set_address("eth0", f"{HOST_GATEWAY}/24")
                internet.set_up("eth0")
            # Every address but the link's own is a local one here.
            subprocess.run(["ip", "route", "add", "local", "0.0.0.0/0", "dev", "lo", "table", "main"], check=True)

        def out() -> None:
            with RouteNetlink() as host:
                host.set_route("eth0", "0.0.0.0/0", gateway=HOST_GATEWAY)

        inside(self.host, at_host)
        inside(self.internet, at_internet)
        inside(self.host, out)

    def _forward(self, port: int) -> Callable[[], None]:
        """Carry connections to 127.0.0.1:port of this namespace to the same place on the sealed host."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(256)
            self._host_process.ask(op="forward", port=port, descriptor=listener.fileno())
        return lambda: self._host_process.ask(op="close", port=port)

    @cached_property
    def _folder(self) -> Path:
        folder = tempfile.mkdtemp(prefix="cpuos-sealed-")
        self._host_process.ask(op="folder", path=folder)  # which removes it, however this process ends
        return Path(folder)


class FakeNames:
    """What the fake internet's name servers answer; every resolver's address is theirs."""

    def __init__(self, process: _Child) -> None:
        self._process = process

    def set(self, name: str, values: Sequence[str] | Sequence[list[str]], *, kind: str = "A", ttl: int = 60) -> None:
        """Values as in a zone file; a list of lists is given out in turn, the last for ever; none: no such name."""
        row = {"name": name, "type": kind, "ttl": ttl, "values": list(values)}
        self._process.ask(op="dns", row=row)

    def mood(self, broken: str = "", *, delay_s: float = 0.0) -> None:
        """How they answer from now on: "", "silent", "servfail" or "truncate"."""
        self._process.ask(op="dns_mood", broken=broken, delay_s=delay_s)

    def queries(self) -> list[dict[str, str]]:
        """What was asked: name, type, transport, server, client."""
        return self._process.ask(op="queries")


class _Child:
    """A process of the world: it ends when its control socket does."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()

    def __enter__(self) -> _Child:
        own, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", self._module, str(theirs.fileno())]
            # A session of its own: what kills the test's whole group leaves it the time to tidy up.
            self._process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._control = own
        self._control.settimeout(60)
        self._answers = own.makefile("rb")
        self._read()
        return self

    def __exit__(self, *exc: object) -> None:
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def namespace(self) -> Path:
        return Path(f"/proc/{self._process.pid}/ns/net")

    def ask(self, *, op: str, descriptor: int | None = None, **values: Any) -> Any:
        with self._lock:
            packet = json.dumps({"op": op, **values}).encode() + b"\n"
            if descriptor is None:
                self._control.sendall(packet)
            else:
                socket.send_fds(self._control, [packet], [descriptor])
            return self._read()

    def _read(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self._module}: {reply['error']}")
        return reply["answer"]


def _only(kind: type, row: dict[str, Any]) -> dict[str, Any]:
    return {field.name: row[field.name] for field in fields(kind)}


def _routes() -> list[Any]:
    with RouteNetlink() as own:
        return own.routes()
