"""What hundreds of slots take of one process: descriptor numbers that `select` can take, and memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from cpuos.node.network.namespaces import in_fresh_thread, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.nftables import NftContext
from cpuos.node.network.router import Router
from cpuos.node.network.rules import base_rules
from cpuos.runtimes.descriptors import SELECT_LIMIT
from router_world import AMPLE, PLAN, judge

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# In a process of its own: the library does not raise, it aborts.
_NO_LOW_NUMBER = """
import os, resource
from cpuos.errors import PlatformError
from cpuos.node.network.namespaces import in_fresh_thread, new_namespace
from cpuos.node.network.nftables import NftContext
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
while os.dup(1) < 1100:
    pass
try:
    in_fresh_thread(lambda: (new_namespace(), NftContext().run("add table ip one")))
except PlatformError as error:
    print(error)
"""
_MEMORY = """
import os, sys
from pathlib import Path
from cpuos.node.network.namespaces import inside
from cpuos.node.network.nftables import NftContext
from cpuos.testing.memory import resident_mib
contexts = [inside(Path(sys.argv[1]), NftContext) for _ in range(40)]
before = resident_mib(os.getpid())
for context in contexts:
    inside(Path(sys.argv[1]), lambda: context.query("list sets ip"))
print((resident_mib(os.getpid()) - before) / len(contexts))
"""


@pytest.fixture
def router(tmp_path):
    """A namespace with a router's rules."""
    path = tmp_path / "router"

    def make() -> None:
        os.close(new_namespace())
        keep_namespace(path)
        context = NftContext()
        context.run(base_rules(PLAN, limits=AMPLE))
        context.close()

    in_fresh_thread(make)
    yield path
    release_namespace(path)


@pytest.fixture
def many_numbers():
    """As the node's daemon has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] <= 2 * SELECT_LIMIT:
        pytest.skip("this process may not have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def run(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def low_numbers() -> set[int]:
    return {number for number in map(int, os.listdir("/proc/self/fd")) if number < SELECT_LIMIT}


def test_a_number_that_select_cannot_take_is_an_error_and_no_abort():
    told = run(_NO_LOW_NUMBER)
    assert told.startswith("cannot open a context of nftables")
    assert "lower max_sandboxes" in told


def test_a_slot_keeps_one_low_number(router, many_numbers):
    opened, before = [], low_numbers()
    try:
        for _ in range(5):
            opened.append(Router.open(router))
            opened[-1].apply(judge({"mode": "internet"}))
        assert len(low_numbers() - before) <= len(opened)
    finally:
        for one in opened:
            one.close()
    assert not low_numbers() - before


def test_a_context_keeps_nothing_of_what_it_has_read(router):
    assert float(run(_MEMORY, str(router))) < 0.35, "MiB for each context"
