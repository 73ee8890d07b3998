"""A sealed network world: a host without a way out, and a fake internet behind it that owns public-looking addresses.

    with SealedWorld() as world:
        world.dns.set("web.example.test", [addresses.WEB])
        with world.slot(policy=...) as slot: ...                # rules, DNS, peek: one slot and native programs in it
        with world.instance(runtime="gvisor") as instance: ...  # a whole installation inside

Needs root. Nothing inside has a route, a link or a socket to this machine's own network.
"""

from cpuos.testing.sealed import addresses
from cpuos.testing.sealed.certificates import Authority
from cpuos.testing.sealed.instance import SealedInstance
from cpuos.testing.sealed.slot import SealedSlot
from cpuos.testing.sealed.world import Packet, SealedWorld, Seen

__all__ = ["Authority", "Packet", "SealedInstance", "SealedSlot", "SealedWorld", "Seen", "addresses"]
