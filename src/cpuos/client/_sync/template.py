# Generated from src/cpuos/client/_async/template.py by scripts/gen_sync.py; edit that.
"""Template: prepared images that sandboxes start from; build, list, get, delete."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from typing import Any
from urllib.parse import quote

from cpuos.client._backend_sync import call_blocking, call_each, shielded, sleep
from cpuos.client._image import image_name, open_image
from cpuos.client._parse import make_request, parse_answer
from cpuos.client._recipe import RecipeFile, read_recipe_files
from cpuos.client._sink import LineCallback
from cpuos.client._sync.client import Client
from cpuos.client._sync.connection import Gateway, make_ticket
from cpuos.client._sync.files import Files
from cpuos.client._sync.job import Job
from cpuos.errors import CpuosError, error_from_body
from cpuos.types.installation import TemplateList
from cpuos.types.node import TemplateFacts
from cpuos.types.template import Build, BuildCreated, BuildState, BuildStep, StepState, TemplateBuild, TemplateInfo
from cpuos.types.units import parse_duration_s, parse_size_mib

__all__ = ["Template"]

_POLL_S = 0.2
_CREATE_S = 120.0
_CANCEL_S = 60.0


class Template:
    """Prepared images that sandboxes start from. A workspace's own are made by `build`."""

    @classmethod
    def build(
        cls,
        name: str,
        *,
        from_: str | None = None,
        files: Mapping[str, Any] | None = None,
        apt: Sequence[str] | None = None,
        pip: Sequence[str] | None = None,
        run: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        start: str | None = None,
        ready: str | None = None,
        cpu: int | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        timeout: str | float | None = None,
        fresh: bool = False,
        on_output: LineCallback | None = None,
        client: Client | None = None,
    ) -> TemplateInfo:
        """Build a template on top of another (`from_`, default "base") and answer its manifest.

        In this order: `files` are laid down (path of the image to text, bytes, or a `Path` of this machine; a folder's
        with all below it), `apt` and `pip` packages installed, the `run` commands run, all as root in a sandbox of
        its own. `env` holds there and in every sandbox of the template. `start` runs in each new one; a create waits
        for `ready`, such as "port:8000". The same again on the same parent is there at once, and steps that an earlier
        build has done are not done again, unless `fresh` is given. `on_output` gets the build's output, line by line.
        A failed build raises `build_failed`, names its step and leaves nothing; an interrupted one is cancelled.
        """
        found = call_blocking(read_recipe_files, files)
        values: dict[str, Any] = {
            "name": name,
            "from_": from_,
            "files": [file.values() for file in found] or None,
            "apt": None if apt is None else list(apt),
            "pip": None if pip is None else list(pip),
            "run": None if run is None else list(run),
            "env": None if env is None else dict(env),
            "start": start,
            "ready": ready,
            "cpu": cpu,
            "memory_mib": None if memory is None else parse_size_mib(memory, name="memory"),
            "disk_mib": None if disk is None else parse_size_mib(disk, name="disk"),
            "timeout_s": None if timeout is None else parse_duration_s(timeout, name="timeout"),
            "fresh": fresh or None,
        }
        values = {field: value for field, value in values.items() if value is not None}
        body = make_request(TemplateBuild, values, doing="build template")
        with _client(client) as used:
            return cls._build(used, body, found, on_output)

    @classmethod
    def from_image(
        cls,
        source: str | PathLike[str],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        start: str | None = None,
        ready: str | None = None,
        credentials: tuple[str, str] | None = None,
        insecure: bool = False,
        cpu: int | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        timeout: str | float | None = None,
        fresh: bool = False,
        on_output: LineCallback | None = None,
        client: Client | None = None,
    ) -> TemplateInfo:
        """Make a template of an OCI or Docker image and answer its manifest, with the digest that it was made of.

        `source` is a text such as "docker.io/library/alpine:3.20" or "registry.example/x@sha256:…", or a `Path` of
        this machine: an OCI layout (folder or tar file), or what `docker save` writes. It is fetched and unpacked in a
        sandbox, under the workspace's network policy. `credentials` (user and password of the registry) go into that
        sandbox alone and are removed from it as soon as the image is there; `insecure` takes a registry without TLS.
        The image's variables hold in every command; its entrypoint becomes `start` and runs as its user in its
        folder. `env`, `start` and `ready` go before what the image says. The same digest again is there at once.
        """
        sizes = {
            "memory_mib": None if memory is None else parse_size_mib(memory, name="memory"),
            "disk_mib": None if disk is None else parse_size_mib(disk, name="disk"),
            "timeout_s": None if timeout is None else parse_duration_s(timeout, name="timeout"),
        }
        with ExitStack() as opened:
            image = call_blocking(opened.enter_context, open_image(source, credentials=credentials, insecure=insecure))
            values: dict[str, Any] = {
                "name": name or image_name(source),
                "image": image.values,
                "env": None if env is None else dict(env),
                "start": start,
                "ready": ready,
                "cpu": cpu,
                "fresh": fresh or None,
                **sizes,
            }
            values = {field: value for field, value in values.items() if value is not None}
            body = make_request(TemplateBuild, values, doing="build template")
            with _client(client) as used:
                return cls._build(used, body, image.uploads, on_output)

    @classmethod
    def list(cls, *, client: Client | None = None) -> builtins.list[TemplateFacts]:
        """Those of the installation and those of the workspace, by name."""
        with _client(client) as used:
            return parse_answer(TemplateList, (used.server.call("GET", "/v1/templates")).body).templates

    @classmethod
    def get(cls, name: str, *, client: Client | None = None) -> TemplateInfo:
        """Its manifest: digest, parent, steps, what the image had to leave out."""
        with _client(client) as used:
            return parse_answer(TemplateInfo, (used.server.call("GET", _path(name))).body)

    @classmethod
    def delete(cls, name: str, *, client: Client | None = None) -> None:
        """Remove one that the workspace has built; refused (`template_in_use`) while live sandboxes run from it."""
        with _client(client) as used:
            used.server.call("DELETE", _path(name))

    @classmethod
    def _build(
        cls, client: Client, body: bytes, files: builtins.list[RecipeFile], on_output: LineCallback | None
    ) -> TemplateInfo:
        answer = client.server.call("POST", "/v1/builds", content=body, repeatable=False, read_timeout_s=_CREATE_S)
        created = parse_answer(BuildCreated, answer.body)
        build = created.build
        try:
            gateway = None
            if build.sandbox is not None and created.access is not None:
                ticket = make_ticket(created.access, answer)
                gateway = Gateway(client.http, client.server, sandbox_id=build.sandbox, ticket=ticket)
            build = _follow(client, gateway, build, files, on_output)
        except BaseException:
            if not build.state.ended:
                shielded(_cancel, client, build.id, timeout_s=_CANCEL_S)
            raise
        if build.error is not None:
            raise error_from_body({"error": build.error.model_dump(by_alias=True)})
        assert build.template is not None
        return build.template


def _upload(client: Client, gateway: Gateway, build: Build, files: list[RecipeFile]) -> Build:
    there = Files(gateway, client.server)
    for file in files:
        if isinstance(file.content, bytes):
            there.write(file.path, file.content, mode=file.mode, user="root")
        else:
            with file.content.open("rb") as content:
                there.write(file.path, content, mode=file.mode, user="root")
    answer = client.server.call("PATCH", f"/v1/builds/{build.id}", content=b'{"uploaded": true}')
    return parse_answer(Build, answer.body)


def _follow(
    client: Client,
    gateway: Gateway | None,
    build: Build,
    files: list[RecipeFile],
    on_output: LineCallback | None,
) -> Build:
    """Until it has ended; each step's title and output are told in order. Without a gateway nothing runs for it: an
    equal build has done the work, or does it. Where that one comes to nothing this one gets a sandbox."""
    told = 0
    while True:
        if gateway is None and build.sandbox is not None:
            gateway = Gateway(client.http, client.server, sandbox_id=build.sandbox)
        if gateway is not None and build.state is BuildState.UPLOADING:
            build = _upload(client, gateway, build, files)
        for step in build.steps[told:]:
            if gateway is None or step.state is StepState.PENDING:
                break
            _tell(gateway, step, on_output)
            told += 1
        if build.state.ended:
            return build
        sleep(_POLL_S)
        build = parse_answer(Build, (client.server.call("GET", f"/v1/builds/{build.id}")).body)


def _tell(gateway: Gateway, step: BuildStep, on_output: LineCallback | None) -> None:
    if on_output is None:
        return
    call_each(on_output, [f"== {step.name}: {step.text}{' (done before)' if step.cached else ''}"])
    if step.command is None:
        return
    # What the packer says on stdout is for the server.
    on_stdout = None if step.name == "pack" else on_output
    job = Job(gateway, None, command_id=step.command, on_stdout=on_stdout, on_stderr=on_output)
    with suppress(CpuosError):  # the build itself tells how it ended
        job.wait()


def _cancel(client: Client, build_id: str) -> None:
    with suppress(CpuosError):  # it ends by its own time
        client.server.call("DELETE", f"/v1/builds/{build_id}")


@contextmanager
def _client(client: Client | None) -> Iterator[Client]:
    """The one given, or one for this call."""
    if client is not None:
        yield client
        return
    with Client() as own:
        yield own


def _path(name: str) -> str:
    return f"/v1/templates/{quote(name, safe='')}"
