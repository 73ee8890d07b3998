"""The policy verb: journaled first, put in force, never turned back, and taken up again by the next daemon."""

from __future__ import annotations

import pytest

from cpuos.errors import Conflict, InvalidRequest, NotFound, PlatformError
from cpuos.testing.faults import Faults
from cpuos.testing.node import fake_node
from cpuos.types.network import EffectivePolicy, NetworkPolicy, PolicyLayer
from cpuos.types.node import NodeSandboxCreate

A = "a" * 20


def policy(version: int, *allow: str) -> EffectivePolicy:
    return EffectivePolicy(
        version=version, layers=[PolicyLayer(origin="sandbox", policy=NetworkPolicy(allow=list(allow)))]
    )


async def test_create_puts_its_policy_in_force_and_a_default_is_off(settings, asking):
    async with fake_node(settings) as node:
        await node.client.create(asking(network=policy(3, "a.example")))
        assert node.parts.slots.policies[A] == policy(3, "a.example")
        await node.client.delete(A, generation=1)
        assert A not in node.parts.slots.policies
    assert NodeSandboxCreate(**asking().model_dump(exclude={"network"})).network.layers[0].policy.mode == "off"


async def test_newer_policies_replace_and_older_ones_do_not(settings, asking):
    async with fake_node(settings) as node:
        await node.client.create(asking(network=policy(1)))
        await node.client.update_network(A, generation=1, policy=policy(3, "b.example"))
        with pytest.raises(Conflict) as caught:
            await node.client.update_network(A, generation=1, policy=policy(2, "late.example"))
        assert (caught.value.code, caught.value.details) == ("stale_policy", {"known": 3})
        assert node.parts.slots.policies[A] == policy(3, "b.example")
        await node.client.create(asking(network=policy(1)))  # a repeat of the create turns nothing back
        await node.client.create(asking(network=policy(2)))  # nor does one that was made with a policy in between
        assert node.parts.slots.policies[A] == policy(3, "b.example")


async def test_wrong_calls_are_refused(settings, asking):
    async with fake_node(settings) as node:
        with pytest.raises(NotFound):
            await node.client.update_network(A, generation=1, policy=policy(2))
        await node.client.create(asking())
        with pytest.raises(Conflict) as caught:
            await node.client.update_network(A, generation=2, policy=policy(2))
        assert caught.value.code == "stale_generation"
        with pytest.raises(InvalidRequest):
            await node.client._call("PUT", f"/v1/sandboxes/{A}/network", body={"generation": 1})


@pytest.mark.parametrize("point", ["network.record.before", "network.record.after", "network.apply.before"])
async def test_a_policy_that_failed_is_put_in_force_by_its_repeat(settings, asking, point):
    async with fake_node(settings, checkpoint=Faults(point)) as node:
        await node.client.create(asking(network=policy(1)))
        with pytest.raises(PlatformError, match="cannot change the network of sandbox"):
            await node.client.update_network(A, generation=1, policy=policy(2, "b.example"))
        assert node.parts.slots.policies[A] == policy(1)
        await node.client.update_network(A, generation=1, policy=policy(2, "b.example"))
        assert node.parts.slots.policies[A] == policy(2, "b.example")


async def test_the_next_daemon_takes_up_the_newest_policy(settings, asking):
    faults = Faults("network.apply.before")
    async with fake_node(settings, checkpoint=faults) as node:
        await node.client.create(asking(network=policy(1)))
        with pytest.raises(PlatformError):
            await node.client.update_network(A, generation=1, policy=policy(2, "b.example"))
    async with fake_node(settings) as node:
        assert node.parts.slots.policies[A] == policy(2, "b.example"), "what was journaled holds"
        await node.client.delete(A, generation=1)


async def test_a_sandbox_without_its_slot_is_ended(settings, asking):
    async with fake_node(settings) as node:
        await node.client.create(asking())
        await node.parts.slots.release(A)
    async with fake_node(settings) as node:
        facts = await node.client.get(A)
        assert not facts.alive
        assert facts.exit_reason.startswith("its network slot could not be taken up again: ")
        await node.client.delete(A, generation=1)
