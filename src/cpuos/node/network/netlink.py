"""Route netlink in the few messages that a slot needs: a process a step would cost more than all of them."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Route", "RouteNetlink"]

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/veth.h, linux/neighbour.h
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_REPLACE, _NLM_F_EXCL, _NLM_F_CREATE = 1, 4, 0x100, 0x200, 0x400
_NLM_F_DUMP = 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK, _RTM_SETLINK, _RTM_NEWADDR, _RTM_GETADDR = 16, 17, 18, 19, 20, 22
_RTM_NEWROUTE, _RTM_GETROUTE, _RTM_NEWNEIGH = 24, 26, 28
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_TXQLEN = 1, 3, 4, 13
_IFLA_LINKINFO, _IFLA_STATS64, _IFLA_NET_NS_FD = 18, 23, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_NDA_DST, _NDA_LLADDR = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC = 1, 4, 5, 7
_RT_TABLE_MAIN, _RTPROT_STATIC, _RT_SCOPE_UNIVERSE, _RT_SCOPE_LINK, _RTN_UNICAST = 254, 4, 0, 253, 1
_NUD_PERMANENT = 0x80
_IFF_UP = 1
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_ROUTE = struct.Struct("=BBBBBBBBI")
_RECEIVED = struct.Struct("=16xQ")  # struct rtnl_link_stats64: packets in, packets out, bytes in


@dataclass(frozen=True, kw_only=True)
class Route:
    """An IPv4 route of any table, local addresses included."""

    network: ipaddress.IPv4Network
    device: str
    """Empty where there is none, or are several: blackholes, and routes that share their load."""
    is_way: bool = True
    """Whether packets go anywhere by it: no blackhole, and nothing that ends here."""


class RouteNetlink:
    """A socket in the network namespace of the thread that opens it; each call raises OSError on the kernel's no."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._number = 0

    def __enter__(self) -> RouteNetlink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def add_veth(self, name: str, *, mac: str, peer: str, peer_mac: str, peer_netns: int) -> None:
        """A pair with one end here and the other, in one step, in the namespace behind `peer_netns`."""
        far = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        far += _text(_IFLA_IFNAME, peer) + _attribute(_IFLA_ADDRESS, _mac(peer_mac))
        far += _attribute(_IFLA_NET_NS_FD, struct.pack("=I", peer_netns))
        info = _text(_IFLA_INFO_KIND, "veth") + _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, far))
        body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        body += _text(_IFLA_IFNAME, name) + _attribute(_IFLA_ADDRESS, _mac(mac)) + _attribute(_IFLA_LINKINFO, info)
        self._ask(_RTM_NEWLINK, _NLM_F_CREATE | _NLM_F_EXCL, body)

    def set_up(self, name: str) -> None:
        self._ask(_RTM_SETLINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, socket.if_nametoindex(name), _IFF_UP, _IFF_UP))

    def set_address(self, name: str, address: str) -> None:
        """`address` with its prefix length; one that is there already is fine."""
        interface = ipaddress.ip_interface(address)
        family = socket.AF_INET if interface.version == 4 else socket.AF_INET6
        body = _ADDRESS.pack(family, interface.network.prefixlen, 0, 0, socket.if_nametoindex(name))
        body += _attribute(_IFA_LOCAL, interface.ip.packed) + _attribute(_IFA_ADDRESS, interface.ip.packed)
        self._ask(_RTM_NEWADDR, _NLM_F_CREATE | _NLM_F_REPLACE, body)

    def set_neighbour(self, name: str, address: str, *, mac: str) -> None:
        """A permanent entry: nobody is asked, so nobody can answer wrongly."""
        body = _NEIGHBOUR.pack(socket.AF_INET, socket.if_nametoindex(name), _NUD_PERMANENT, 0, 0)
        body += _attribute(_NDA_DST, ipaddress.ip_address(address).packed) + _attribute(_NDA_LLADDR, _mac(mac))
        self._ask(_RTM_NEWNEIGH, _NLM_F_CREATE | _NLM_F_REPLACE, body)

    def set_route(self, name: str, network: str, *, gateway: str | None = None, source: str | None = None) -> None:
        """Reach `network` through the device, directly or by a gateway; one that is there already is replaced."""
        target = ipaddress.IPv4Network(network)
        scope = _RT_SCOPE_UNIVERSE if gateway else _RT_SCOPE_LINK
        head = (socket.AF_INET, target.prefixlen, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC, scope, _RTN_UNICAST, 0)
        body = _ROUTE.pack(*head) + _attribute(_RTA_DST, target.network_address.packed)
        body += _attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(name)))
        for kind, address in ((_RTA_GATEWAY, gateway), (_RTA_PREFSRC, source)):
            if address:
                body += _attribute(kind, ipaddress.IPv4Address(address).packed)
        self._ask(_RTM_NEWROUTE, _NLM_F_CREATE | _NLM_F_REPLACE, body)

    def delete_link(self, name: str) -> None:
        """Remove a device, and with a veth its other end. Nothing there is fine."""
        try:
            index = socket.if_nametoindex(name)
        except OSError:
            return
        try:
            self._ask(_RTM_DELLINK, 0, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0))
        except OSError as problem:
            # The far end's namespace may have ended meanwhile, and the device with it.
            if problem.errno != errno.ENODEV:
                raise

    def routes(self) -> list[Route]:
        """Every IPv4 route of every table."""
        found = []
        for body in self._dump(_RTM_GETROUTE, _ROUTE.pack(socket.AF_INET, *[0] * 8)):
            family, prefix, *_, kind, _ = _ROUTE.unpack_from(body)
            if family != socket.AF_INET:
                continue
            attributes = dict(_attributes(body[_ROUTE.size :]))
            network = ipaddress.IPv4Network((attributes.get(_RTA_DST, b"\0" * 4), prefix))
            device = _device(attributes.get(_RTA_OIF))
            found.append(Route(network=network, device=device, is_way=kind == _RTN_UNICAST))
        return found

    def addresses(self) -> list[tuple[str, ipaddress.IPv4Interface]]:
        """Device and address of every IPv4 address here."""
        found = []
        for body in self._dump(_RTM_GETADDR, _ADDRESS.pack(socket.AF_INET, 0, 0, 0, 0)):
            family, prefix, _, _, index = _ADDRESS.unpack_from(body)
            attributes = dict(_attributes(body[_ADDRESS.size :]))
            packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
            if family == socket.AF_INET and packed:
                found.append((_device(struct.pack("=I", index)), ipaddress.IPv4Interface((packed, prefix))))
        return found

    def received_bytes(self) -> dict[str, int]:
        """By device: what came in by it since it was made."""
        found = {}
        for body in self._dump(_RTM_GETLINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
            attributes = dict(_attributes(body[_LINK.size :]))
            name = attributes[_IFLA_IFNAME].rstrip(b"\0").decode()
            found[name] = _RECEIVED.unpack_from(attributes[_IFLA_STATS64])[0]
        return found

    def leads_away(self, address: ipaddress.IPv4Address) -> bool:
        """Whether a packet to it would leave this host: it is none of its own, no broadcast, and there is a way."""
        self._number += 1
        body = _ROUTE.pack(socket.AF_INET, 32, *[0] * 7) + _attribute(_RTA_DST, address.packed)
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, self._number, 0) + body)
        number = -1
        while number != self._number:  # an answer that nobody took is not taken for this one
            answer = self._socket.recv(65536)
            _, kind, _, number, _ = _HEADER.unpack_from(answer)
        return kind == _RTM_NEWROUTE and _ROUTE.unpack_from(answer, _HEADER.size)[7] == _RTN_UNICAST

    def set_size(self, name: str, *, packet_bytes: int, queue_packets: int) -> None:
        """The longest packet of a device, and how many wait in it."""
        body = _LINK.pack(socket.AF_UNSPEC, 0, socket.if_nametoindex(name), 0, 0)
        body += _attribute(_IFLA_MTU, struct.pack("=I", packet_bytes))
        self._ask(_RTM_SETLINK, 0, body + _attribute(_IFLA_TXQLEN, struct.pack("=I", queue_packets)))

    def _dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        self._number += 1
        self._socket.send(
            _HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST | _NLM_F_DUMP, self._number, 0) + body
        )
        while True:
            data = self._socket.recv(1 << 18)
            while data:
                length, answer, _, number, _ = _HEADER.unpack_from(data)
                if answer == _NLMSG_DONE:
                    return
                if answer == _NLMSG_ERROR or number != self._number or length < _HEADER.size:
                    raise OSError(errno.EPROTO, "unexpected netlink answer")
                yield data[_HEADER.size : length]
                data = data[(length + 3) & ~3 :]

    def _ask(self, kind: int, flags: int, body: bytes) -> None:
        self._number += 1
        head = _HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST | _NLM_F_ACK | flags, self._number, 0)
        self._socket.send(head + body)
        answer = self._socket.recv(65536)
        _, answer_kind, _, number, _ = _HEADER.unpack_from(answer)
        if answer_kind != _NLMSG_ERROR or number != self._number:
            raise OSError(errno.EPROTO, "unexpected netlink answer")
        code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if code:
            raise OSError(code, os.strerror(code))


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]


def _device(index: bytes | None) -> str:
    try:
        return socket.if_indextoname(struct.unpack("=I", index)[0]) if index else ""
    except OSError:  # it went meanwhile
        return ""


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))
