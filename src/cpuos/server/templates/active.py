"""A build at work in this process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from cpuos.server.templates.recipe import build_key, layer_keys
from cpuos.types.template import Build, BuildStep, StepState, TemplateBuild, TemplateInfo

__all__ = ["Active"]


@dataclass(kw_only=True)
class Active:
    build: Build
    request: TemplateBuild
    workspace: str
    actor: str
    parent_digest: str
    network: str
    """The workspace's policy, as it counts for keys."""
    sandbox: Row[Any] | None
    """None: an equal build is at work, and this one waits for it. Where that comes to nothing it gets one."""
    known: TemplateInfo | None = None
    """What it was to make turned out to be there: its name means that now."""
    cached: int = 0
    """So many steps had been done before; the sandbox began with what they left."""
    uploaded: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    cancelled: str = ""
    """By whom."""
    settled: bool = False
    """How it ends is certain: from here on it is not cancelled."""

    @property
    def row(self) -> Row[Any]:
        """Of its sandbox."""
        assert self.sandbox is not None
        return self.sandbox

    @property
    def key(self) -> str:
        """Of all that goes into it."""
        return build_key(self.request, workspace=self.workspace, parent_digest=self.parent_digest, network=self.network)

    @property
    def layers(self) -> list[str]:
        """Keys of what its steps leave."""
        return layer_keys(
            self.request, workspace=self.workspace, parent_digest=self.parent_digest, network=self.network
        )

    @property
    def at(self) -> str:
        """The name of the step that it is in."""
        running = self.running_step()
        if running is not None:
            return running.name
        return "wait" if self.sandbox is None else "upload"

    def step(self, name: str, **changes: Any) -> None:
        steps = [step.model_copy(update=changes) if step.name == name else step for step in self.build.steps]
        self.build = self.build.model_copy(update={"steps": steps})

    def reuse(self) -> None:
        """Others have made it."""
        steps = [step.model_copy(update={"state": StepState.DONE}) for step in self.build.steps]
        self.build = self.build.model_copy(update={"steps": steps, "reused": True})

    def running_step(self) -> BuildStep | None:
        return next((step for step in self.build.steps if step.state is StepState.RUNNING), None)

    def cancel(self, *, by: str) -> None:
        # Once: a second would cut short what the first makes it tidy.
        if self.task is not None and not self.cancelled and not self.settled:
            self.cancelled = by
            self.task.cancel()
