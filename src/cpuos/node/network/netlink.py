"""Route netlink in the few messages that a slot needs: a process a step would cost more than all of them."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from types import TracebackType

__all__ = ["RouteNetlink"]

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/veth.h, linux/neighbour.h
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_REPLACE, _NLM_F_EXCL, _NLM_F_CREATE = 1, 4, 0x100, 0x200, 0x400
_NLMSG_ERROR = 2
_RTM_NEWLINK, _RTM_SETLINK, _RTM_NEWADDR, _RTM_NEWNEIGH = 16, 19, 20, 28
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_NDA_DST, _NDA_LLADDR = 1, 2
_NUD_PERMANENT = 0x80
_IFF_UP = 1
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")


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


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))
