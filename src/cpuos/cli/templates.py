"""template: build, ls, inspect, rm."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.hints import as_root
from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.sandboxes import parse_pairs
from cpuos.cli.streams import GuestWriter
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos.types.node import TemplateFacts
    from cpuos.types.template import TemplateInfo

__all__ = ["build_template", "import_image", "inspect_template", "list_templates", "register", "remove_template"]

NameArgument = Annotated[str, typer.Argument(help="Name of a template.", metavar="NAME")]
# Of a build file; the same as of `Template.build`.
_FIELDS = (
    "name",
    "from",
    "files",
    "apt",
    "pip",
    "run",
    "env",
    "start",
    "ready",
    "cpu",
    "memory",
    "disk",
    "timeout",
    "fresh",
)


def register(app: typer.Typer) -> None:
    group = command_group("Prepared images that sandboxes start from.")
    group.command("build")(build_template)
    group.command("import")(import_image)
    group.command("ls")(list_templates)
    group.command("inspect")(inspect_template)
    group.command("rm")(remove_template)
    app.add_typer(group, name="template")


def build_template(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="Build file (TOML); options add to it.", metavar="FILE")] = None,
    name: Annotated[str | None, typer.Option(help="What sandboxes call it.")] = None,
    parent: Annotated[str | None, typer.Option("--from", help="Template to start from (default base).")] = None,
    copy: Annotated[
        list[str] | None, typer.Option("--copy", help="LOCAL:PATH, a file or folder into the image; may be repeated.")
    ] = None,
    apt: Annotated[list[str] | None, typer.Option(help="Package of the distribution; may be repeated.")] = None,
    pip: Annotated[list[str] | None, typer.Option(help="Python package; may be repeated.")] = None,
    run: Annotated[list[str] | None, typer.Option(help="Command, as root; may be repeated.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; may be repeated.")] = None,
    start: Annotated[str | None, typer.Option(help="Command that runs in each new sandbox.")] = None,
    ready: Annotated[str | None, typer.Option(help="What a create waits for: port:8000.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Longest time of the build (default 30m).")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do every step anew, whatever was built before.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a template in a sandbox of its own, and print its name.

    The output of its steps comes on stderr. The same again on the same parent is there at once; steps that an earlier
    build has done are not done again.
    """
    from cpuos import Client, Template

    output = current_output(ctx)
    values = _read_file(file) if file is not None else {}
    given = {"name": name, "from": parent, "start": start, "ready": ready, "timeout": timeout}
    values |= {key: value for key, value in given.items() if value is not None}
    for key, more in (("apt", apt), ("pip", pip), ("run", run)):
        values[key] = [*values.get(key, ()), *(more or ())]
    if fresh:
        values["fresh"] = True
    values["env"] = {**values.get("env", {}), **parse_pairs(env, option="--env")}
    values["files"] = {**values.get("files", {}), **_read_copies(copy)}
    if "name" not in values:
        raise InvalidRequest(
            "cannot build template: it has no name",
            "--name, or name in the build file",
            hint="cpuos template build --name mine --apt ffmpeg",
        )
    name, parent = values.pop("name"), values.pop("from", None)
    with Client() as client, _shown_output(output, f"building template {name}") as tell:
        built = Template.build(name, from_=parent, on_output=tell, client=client, **values)
    if output.json:
        output.data(built)
        return
    output.line(built.name)
    output.progress(f"{built.size_bytes >> 20} MiB, {built.digest}; use it: cpuos create --template {built.name}")


def import_image(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="HOST/NAME:TAG, HOST/NAME@sha256:DIGEST, or a path: OCI layout, docker save.", metavar="IMAGE"
        ),
    ],
    name: Annotated[str | None, typer.Option(help="What sandboxes call it (default the image's name).")] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; may be repeated.")] = None,
    start: Annotated[str | None, typer.Option(help="Runs in each new sandbox, not the image's entrypoint.")] = None,
    ready: Annotated[str | None, typer.Option(help="What a create waits for: port:8000.")] = None,
    user: Annotated[str | None, typer.Option(help="User at the registry; its password is read from stdin.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Take a registry without TLS.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Longest time of the build (default 30m).")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do it anew, whatever was built before.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a template of an OCI or Docker image, and print its name.

    It is fetched and unpacked in a sandbox. What is on this machine is given as a path with a slash in front or after a
    dot: ./image.tar.
    """
    from cpuos import Client, Template

    output = current_output(ctx)
    is_path = source.startswith(("/", "./", "../", "~"))
    given: dict[str, Any] = {"name": name, "start": start, "ready": ready, "timeout": timeout}
    values = {key: value for key, value in given.items() if value is not None}
    if user is not None:
        values["credentials"] = (user, sys.stdin.readline().rstrip("\n"))
    with Client() as client, _shown_output(output, f"making a template of {source}") as tell:
        built = Template.from_image(
            Path(source).expanduser() if is_path else source,
            env=parse_pairs(env, option="--env") or None,
            insecure=insecure,
            fresh=fresh,
            on_output=tell,
            client=client,
            **values,
        )
    if output.json:
        output.data(built)
        return
    output.line(built.name)
    of = built.image.digest if built.image is not None else ""
    output.progress(f"{built.size_bytes >> 20} MiB of image {of}; use it: cpuos create --template {built.name}")


@contextlib.contextmanager
def _shown_output(output: Output, text: str) -> Iterator[Callable[[str], None] | None]:
    """For `on_output`: a build's lines on stderr, and that it goes on while there are none; with --json no lines."""
    with output.working(text) as work:
        writer = GuestWriter(sys.stderr)  # made within: on a terminal its lines stand above the live one

        def tell(line: str) -> None:
            work.printed()
            writer.write(f"{line}\n".encode())

        try:
            yield None if output.json else tell
        finally:
            writer.close()


def list_templates(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the templates that sandboxes can start from."""
    from cpuos import Client, Template

    output = current_output(ctx)
    with Client() as client:
        templates = Template.list(client=client)
    empty = f"no template is installed; make them with: {as_root('cpuos setup')}"
    output.listing("templates", templates, ("NAME", "ORIGIN", "SIZE", "DIGEST"), _row, empty=empty)


def inspect_template(ctx: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Show what a template is made of."""
    from cpuos import Client, Template

    output = current_output(ctx)
    with Client() as client:
        template = Template.get(name, client=client)
    output.fields(template, _rows(template))


def remove_template(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(help="Names of templates.", metavar="NAME…")],
    as_json: JsonOption = False,
) -> None:
    """Remove templates that this workspace has built; refused while live sandboxes were started from one."""
    from cpuos import Client, Template

    output = current_output(ctx)
    with Client() as client:
        output.removed(names, lambda name: Template.delete(name, client=client))


def _row(template: TemplateFacts) -> tuple[str, ...]:
    origin = "built here" if template.built else "installed"
    return template.name, origin, _size(template.size_bytes), template.digest


def _rows(template: TemplateInfo) -> list[tuple[str, str]]:
    rows = [("name", template.name), ("digest", template.digest), ("size", _size(template.size_bytes))]
    if not template.built:
        return [*rows, ("origin", "installed")]
    made_of = [("parent", f"{template.parent} {template.parent_digest}")]
    if (image := template.image) is not None:
        made_of = [("image", f"{image.reference or 'an archive'} {image.digest}")]
        made_of += [("runs", f"as {image.user} in {image.folder}")]
        made_of += [("left out", what) for what in image.left_out]
    rows += [*made_of, ("built", f"{template.created_at:%F %T}Z")]
    rows += [("step", step) for step in template.steps]
    rows += [("file", f"{path} sha256:{digest}") for path, digest in sorted(template.files.items())]
    rows += [("env", f"{key}={value}") for key, value in sorted(template.env.items())]
    rows += [(key, value) for key, value in (("start", template.start), ("ready", template.ready)) if value]
    rows += [("left out", f"{dropped.path}: {dropped.what}") for dropped in template.dropped]
    more = template.dropped_count - len(template.dropped)
    return [*rows, ("left out", f"{more} more")] if more > 0 else rows


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB"


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidRequest(f"cannot read the build file: {file}", error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the build file: {file}", f"it is not TOML: {error}") from error
    unknown = sorted(values.keys() - set(_FIELDS))
    if unknown:
        raise InvalidRequest(
            f"cannot read the build file: unknown field {unknown[0]!r}", f"it has: {', '.join(_FIELDS)}"
        )
    files = values.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(local, str) for local in files.values()):
        raise InvalidRequest("cannot read the build file: files", 'it is a table: "/opt/app.py" = "app.py"')
    # Paths in a build file are from where it lies.
    return {**values, "files": {path: file.parent / local for path, local in files.items()}}


def _read_copies(copies: list[str] | None) -> dict[str, Path]:
    found = {}
    for text in copies or []:
        local, _, path = text.rpartition(":")
        if not local or not path.startswith("/"):
            raise InvalidRequest(
                f"cannot read --copy: {text!r}",
                "it is written LOCAL:/PATH/IN/THE/IMAGE",
                hint="cpuos template build NAME --copy app:/opt/app",
            )
        found[path] = Path(local)
    return found
