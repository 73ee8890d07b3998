"""The audit's list of actions is that of the code."""

from __future__ import annotations

from cpuos.gateway.app import ROUTES as GATEWAY_ROUTES
from cpuos.server.routes.table import ROUTES
from cpuos.types.audit import ACTIONS


def test_actions_are_those_of_the_tables() -> None:
    made = {route.audit for route in ROUTES} | {route.action for route in GATEWAY_ROUTES}
    by_itself = {"expire", "restore_incomplete", "lost"}
    own = {f"sandbox.{action}" for action in by_itself} | {"limit.reached", "node.pressure", "node.volume"}
    own |= {"alarm.begin", "alarm.end", "audit.prune", "sandbox.prune"}
    assert set(ACTIONS) == (made - {None}) | own
