"""A later daemon takes a sandbox up again, or knows for certain that it has ended: trouble of its own is neither."""

from __future__ import annotations

import errno
import os

import pytest

from cpuos.runtimes.processes import find_process, open_process
from cpuos.testing.node import fake_node

A = "a" * 20


def out_of_descriptors(_: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_trouble_in_adopting_is_no_death(settings, asking, monkeypatch):
    async with fake_node(settings) as node:
        await node.client.create(asking())
    with monkeypatch.context() as patched:
        patched.setattr("cpuos.testing.fake_runtime.FakeRuntime.adopt", _fail)
        async with fake_node(settings) as node:
            assert (await node.client.get(A)).alive
            await node.service.sweep()
            assert (await node.client.get(A)).alive
            patched.undo()
            await node.service.sweep()
            await node.parts.runtimes["fake"].destroy(A)
            change = await node.client.changes(1, wait_s=20)
            assert [one.exit_reason for one in change.changes if not one.alive] == ["its process ended"]


async def _fail(*_: object) -> bool:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_only_the_kernel_says_that_a_process_has_ended(monkeypatch):
    own = find_process(os.getpid())
    assert own is not None
    monkeypatch.setattr(os, "pidfd_open", out_of_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        open_process(own)
