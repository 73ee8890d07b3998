"""Where an instance keeps its things, and the few numbers an operator sets.

Read from `CPUOS_*` variables, then `<data>/config.toml`. An instance is a state directory and a run directory; the data
directory holds artifacts that instances share. Every host name an instance makes derives from `instance_id`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from cpuos.errors import InvalidRequest
from cpuos.key_file import DEFAULT_RUN_DIR
from cpuos.places import Places
from cpuos.preview_domain import check_preview_domain, check_preview_url

__all__ = [
    "DEFAULT_DATA_DIR",
    "DEFAULT_RUN_DIR",
    "RUNSC_VERSION",
    "Settings",
    "load_settings",
    "publish_endpoint",
    "read_endpoint",
]

RUNSC_VERSION = "v0.0.0-20260905035102-160fafc42237"
"""The gVisor module version this release is written and tested against."""

_POOL_KEEP = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})(?:@([0-9]{1,2})x([0-9]{1,7})x([0-9]{1,7}))?=([0-9]{1,4})")
DEFAULT_DATA_DIR = Path("/var/lib/cpuos")
# The instance that runs in DEFAULT_RUN_DIR is the machine's own: its key lies in a home, its command on the PATH.


class Settings(Places, BaseSettings):
    """Settings of one instance; derived paths are properties."""

    model_config = SettingsConfigDict(env_prefix="CPUOS_", extra="ignore", frozen=True)

    data_dir: Path = DEFAULT_DATA_DIR
    """Artifacts shared by instances: runsc, agent, templates, caches, the installed package."""
    state_dir: Path = Path()
    """What must survive a restart; `<data>/state` unless set."""
    run_dir: Path = DEFAULT_RUN_DIR
    """Sockets, pid files and the runtime's state; gone after a reboot."""

    api_host: str = "127.0.0.1"
    """Where the API listens."""
    api_port: int = Field(7070, ge=0, le=65535)
    """As `gateway_port`."""
    gateway_host: str = "127.0.0.1"
    """Where the gateway listens."""
    gateway_port: int = Field(7071, ge=0, le=65535)
    """A port of 0 means: choose one and publish it with `publish_endpoint`."""
    api_public_url: str = ""
    """The API's URL as clients see it, where that is not host and port (a proxy in front)."""
    gateway_public_url: str = ""
    """The gateway's URL as clients see it; it goes into every `data_url`."""

    preview_host: str = "127.0.0.1"
    """Where previews are served."""
    preview_port: int = Field(7072, ge=0, le=65535)
    """As `gateway_port`."""
    preview_domain: str = "preview.localhost"
    """Below it lie the host names of previews, `PORT-SANDBOX.DOMAIN`. Never a name of the API, the gateway or the
    dashboard, nor one below or above such a name: what sandboxes serve there must not share cookies with them."""
    preview_public_url: str = ""
    """The preview domain's URL as visitors see it, where that is not `http://DOMAIN:PORT` (a proxy in front)."""
    preview_path_mode: bool = False
    """Show previews at `http://HOST:PREVIEW_PATH_PORT/SANDBOX/PORT/` too: without cookies or an origin of their own."""
    preview_path_port: int = Field(7073, ge=0, le=65535)
    """As `gateway_port`."""
    preview_tls_cert: str = ""
    """PEM file of a certificate for `*.DOMAIN`; previews are then served by TLS. `cpuos certs` makes one."""
    preview_tls_key: str = ""
    """PEM file of the certificate's key, readable by the gateway's user."""

    runtime: str = "gvisor"
    """What sandboxes run in, where they do not ask for another."""
    max_sandboxes: int = Field(64, ge=1)
    """Sandboxes at once."""
    allow_emulated: bool = False
    """Let sandboxes run in microVMs that QEMU only emulates, where nobody asked for it in the call: for development."""
    firecracker: str = ""
    """Firecracker's program, 1.14.4, 1.15.1 or newer, and `jailer` of the same release: microVMs run in it where KVM
    boots. Unset: what `cpuos setup microvm` has put into the data directory."""
    jailer: str = Field("", validate_default=True)
    """As `firecracker`."""
    microvm_disk_mib_per_s: int = Field(0, ge=0, le=1 << 20)
    """MiB a second that each disk of a microVM reads and writes under Firecracker; 0: no limit of its own."""
    microvm_disk_operations_per_s: int = Field(0, ge=0, le=10_000_000)
    """As `microvm_disk_mib_per_s`, for single reads and writes."""
    cpu_overcommit: float = Field(8.0, ge=1)
    """Sandbox CPUs promised per real one."""
    memory_reserve_mib: int = Field(1024, ge=0)
    """Host memory that is never promised to sandboxes."""
    memory_overcommit: float = Field(1.0, ge=1, le=64)
    """Sandbox memory promised per MiB of the host's, less the reserve. Over 1 some may be paused or refused when many
    use theirs."""
    memory_pressure_mib: int = Field(0, ge=0)
    """Free host memory under which ready sandboxes go, then idle ones are paused, then nothing new is taken. 0: a
    sixteenth of the host's memory, 512 MiB at least."""
    pressure_idle_s: float = Field(30, ge=1)
    """Sandboxes that were idle for so long are paused when the host is short of memory, the longest idle first."""
    processes_overcommit: float = Field(8.0, ge=1)
    """Processes promised per one that the host's kernel allows. A sandbox is promised four times its `max_processes`,
    and 1,024; an idle one takes about 25."""
    disk_reserve_mib: int = Field(2048, ge=0)
    """Space of the state directory's file system that is never promised to sandboxes."""
    disk_overcommit: float = Field(8.0, ge=1, le=64)
    """Sandbox disk promised per MiB of that file system, less the reserve; a sandbox's number counts twice. Over 1 the
    file system may become full, and sandboxes then stand still until there is room."""
    disk_ballast_mib: int = Field(256, ge=0, le=65536)
    """Room held on that file system, at most a twentieth of it, and given back when something else has filled it."""
    root_checkpoint_interval_s: float = Field(300, ge=0)
    """So often what a running sandbox has outside of /workspace is saved, where something happened in it: should it die
    that is there as of then. 0: never, unless a sandbox asks for it."""
    disk_hold: bool = False
    """Take all blocks of a sandbox's disk when it is mounted, so that nothing else can fill the file system under it.
    Each disk then takes its whole size at once."""
    pool_memory_mib: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Memory that sandboxes may take which are started before anyone asks for them, so that a create takes one at once.
    0: none are. "auto" is a sixteenth of the host's. They count as free for everything else, and give way to it."""
    pool_keep: Annotated[list[str], NoDecode] = Field(default_factory=lambda: ["python=2"])
    """`TEMPLATE=COUNT`, or `TEMPLATE@CPUxMEMORYxDISK=COUNT` with sizes in MiB: so many are kept ready; what else is
    ready goes by what is asked for. In the environment separated by commas."""
    pool_settle_s: float = Field(0.3, ge=0)
    """So long after a create none is made: what was created works first."""
    pool_max_age_s: float = Field(3600, ge=1)
    """One that nobody has taken for so long is replaced by another."""
    template_max_mib: int = Field(8192, ge=64)
    """Size of a template that a workspace builds."""
    workspace_templates_mib: int = Field(65536, ge=64)
    """Size of all templates that a workspace has built."""
    workspace_layers_mib: int = Field(8192, ge=0)
    """Size of what is kept of the steps of a workspace's builds, for later builds; 0: nothing."""
    pack_max_mib: int = Field(65536, ge=1)
    """Size of a data pack."""
    workspace_packs_mib: int = Field(262144, ge=1)
    """Size of all data packs of a workspace."""
    output_head_bytes: int = Field(128 << 20, ge=1 << 10)
    """Recorded bytes kept from the start of each output stream."""
    output_tail_bytes: int = Field(128 << 20, ge=1 << 10)
    """Recorded bytes kept from the end of each output stream."""
    output_sandbox_bytes: int = Field(1 << 30, ge=1 << 20)
    """Recorded output kept per sandbox; the oldest ended commands' output goes first."""
    output_ended_bytes: int = Field(8 << 30, ge=0)
    """Recorded output kept of all ended sandboxes together; that of the sandbox that ended first goes first."""
    record_retention_s: float = Field(86400, ge=0, le=365 * 86400)
    """How long an ended sandbox's commands and output stay readable."""

    network_block: str = "auto"
    """IPv4 network (/26 or larger): its first four addresses join this instance's sandboxes to the host, the others are
    seen in the hub only. "auto" takes the first of a list that meets no route of the host."""
    network_uplink: Literal["nat", "user", "none"] = "nat"
    """How sandboxes reach the outside. "nat": by a link and rules on the host. "user": by ordinary sockets of an
    unprivileged process; nothing is changed on the host, and everything passes that one process. "none": not at all."""
    network_exceptions: Annotated[list[str], NoDecode] = Field(default_factory=list)
    """`NAME=ADDRESS:PORT` or `NAME=ADDRESS:PORT/udp`: services in an always-blocked range that sandboxes may reach by
    that name, where their policy allows it. In the environment separated by commas."""
    dns_servers: Annotated[list[str], NoDecode] = Field(default_factory=lambda: ["1.1.1.1", "9.9.9.9", "8.8.8.8"])
    """Addresses of the resolvers that answer for sandboxes; never the host's own, which may know private names."""
    network_pool: int = Field(4, ge=0, le=256)
    """Network slots that are kept ready, so that a create does not wait for one."""
    network_connections: int = Field(512, ge=16, le=60_000)
    """Connections that one sandbox has open at once; half as many of those whose host name is read."""
    network_new_connections_per_s: int = Field(200, ge=1, le=100_000)
    """Connections that one sandbox begins a second; twice as many at once."""
    network_packets_per_s: int = Field(100_000, ge=100, le=10_000_000)
    """Packets that one sandbox sends a second."""
    network_mib_per_s: int = Field(2500, ge=1, le=100_000)
    """MiB that one sandbox sends a second, and as many that it receives."""
    network_names_per_s: int = Field(200, ge=4, le=10_000)
    """Questions for names that one sandbox asks a second; a quarter of them new ones, which leave the host."""
    connection_records: int = Field(50_000, ge=100)
    """Connections recorded of one sandbox; those beyond are counted in one entry."""
    connection_retention_s: float = Field(30 * 86400, ge=3600)
    """How long the record of a connection is kept."""
    audit_retention_s: float = Field(0, ge=0)
    """How long an audit entry stays in the database; 0: for ever, and less than a day is a day. Before entries leave it
    they are written to `audit/YYYY-MM.jsonl` in the server's state folder, where nothing removes them."""
    sandbox_retention_s: float = Field(90 * 86400, ge=0)
    """How long the record of an ended sandbox is kept, when nothing else of it is: no output, connections or snapshots.
    0: for ever, and less than a day is a day. Its audit entries stay."""
    alarms: Annotated[list[str], NoDecode] = Field(
        default_factory=lambda: ["cpu=90%/10m", "sent=5GiB/10m", "connections=10000/10m"]
    )
    """What any sandbox may use within a while before the audit tells of it, or before it is paused or killed:
    `MEASURE=LIMIT/WINDOW` or `MEASURE=LIMIT/WINDOW:ACTION`. Rules of a workspace or sandbox hold beside these; an empty
    list leaves those alone."""
    alarm_interval_s: float = Field(10, ge=0.5, le=60)
    """So often it is looked at what sandboxes use."""
    database_url: str = ""
    """SQLAlchemy URL of the server's database; SQLite in the state directory unless set."""
    log_level: str = "info"
    """The least that the daemons write into their logs: debug, info, warning or error."""

    template_host_ca: bool = False
    """Carry the host's CA bundle into templates as they are built."""
    template_host_mirrors: bool = False
    """Carry the host's package mirror configuration, without credentials, into templates as they are built."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment; `load_settings` puts the file below both."""
        return init_settings, env_settings

    @model_validator(mode="before")
    @classmethod
    def _lay_file_below(cls, values: dict[str, Any]) -> dict[str, Any]:
        data_dir = Path(values.get("data_dir") or DEFAULT_DATA_DIR)
        values = {**_read_config(data_dir / "config.toml"), **values}
        values.setdefault("state_dir", data_dir / "state")
        return {key: os.path.abspath(value) if key.endswith("_dir") else value for key, value in values.items()}

    @field_validator("network_exceptions", "dns_servers", "pool_keep", "alarms", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part for part in re.split(r"[,\s]+", value) if part] if isinstance(value, str) else value

    @field_validator("pool_keep")
    @classmethod
    def _check_counts(cls, value: list[str]) -> list[str]:
        for text in value:
            if _POOL_KEEP.fullmatch(text) is None:
                raise ValueError(f"{text!r} is not TEMPLATE=COUNT, such as python=2 or python@1x512x2048=4")
        return value

    @field_validator("jailer")
    @classmethod
    def _name_both_programs(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("firecracker")):
            raise ValueError("firecracker and jailer are of one release, and set together")
        return value

    @field_validator("preview_domain", "preview_public_url")
    @classmethod
    def _keep_previews_apart(cls, value: str, info: ValidationInfo) -> str:
        if info.field_name == "preview_domain":
            return check_preview_domain(value, info.data)
        return check_preview_url(value, info.data.get("preview_domain"))

    # --- names ---

    @cached_property
    def instance_id(self) -> str:
        """Six hex digits that tell this instance's host names (cgroups, links, loops) from another's."""
        return hashlib.sha256(os.path.realpath(self.state_dir).encode()).hexdigest()[:6]

    @property
    def pool_kept(self) -> list[tuple[dict[str, Any], int]]:
        """What is kept ready: the fields of a create, and how many."""
        kept = []
        for text in self.pool_keep:
            match = _POOL_KEEP.fullmatch(text)
            assert match is not None
            name, cpu, memory_mib, disk_mib, count = match.groups()
            sizes = {"cpu": int(cpu), "memory_mib": int(memory_mib), "disk_mib": int(disk_mib)} if cpu else {}
            kept.append(({"template": name, **sizes}, int(count)))
        return kept

    @property
    def server_uid(self) -> int:
        """The user the server runs as: `cpuos-server`, or whoever runs this where set-up has made no users."""
        return _uid_of("cpuos-server")

    @property
    def gateway_uid(self) -> int:
        """The user the gateway runs as: `cpuos-gateway`, or whoever runs this where set-up has made no users."""
        return _uid_of("cpuos-gateway")

    @property
    def network_uid(self) -> int:
        """The user the network workers run as: `cpuos-network`, or whoever runs this where set-up has made no users."""
        return _uid_of("cpuos-network")

    @property
    def runsc_path(self) -> Path:
        """The pinned runsc; its sidecars lie in `gvisor-bin/` beside it."""
        return self.data_dir / "bin" / "runsc" / RUNSC_VERSION / "runsc"

    @property
    def vmm_programs(self) -> dict[str, Path]:
        """Firecracker and its jailer, as they are named or where set-up puts them; empty where they are not."""
        named = {"firecracker": self.firecracker, "jailer": self.jailer}
        if any(named.values()):
            return {name: Path(path) for name, path in named.items()}
        found = {name: self.data_dir / "bin" / "firecracker" / name for name in named}
        return found if all(path.exists() for path in found.values()) else {}

    @property
    def device_rates(self) -> dict[str, int]:
        """By the names of `runtimes.base.DeviceRates`."""
        return {
            "disk_mib_per_s": self.microvm_disk_mib_per_s,
            "disk_operations_per_s": self.microvm_disk_operations_per_s,
            "network_mib_per_s": self.network_mib_per_s,
            "network_packets_per_s": self.network_packets_per_s,
        }

    @property
    def server_db_url(self) -> str:
        """SQLAlchemy URL of the server's database."""
        return self.database_url or f"sqlite+aiosqlite:///{self.server_state_dir / 'cpuos.db'}"

    def environment(self) -> dict[str, str]:
        """The settings as `CPUOS_*` variables: what a child process needs to have the same ones."""
        values = self.model_dump(mode="json")
        return {f"CPUOS_{name.upper()}": _as_text(value) for name, value in values.items()}


def load_settings(**values: Any) -> Settings:
    """Settings with these values above the environment; wrong ones raise `InvalidRequest` that names them."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"cannot read the settings: {name} = {first['input']!r}", first["msg"], hint=f"unset CPUOS_{name.upper()}"
        ) from error


def publish_endpoint(path: Path, url: str) -> None:
    """Write `{"url": url}` to `path`, whole or not at all, readable by the group."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"url": url}))
    partial.chmod(0o640)
    partial.replace(path)


def read_endpoint(path: Path) -> str | None:
    """The URL published at `path`; None while nothing is."""
    try:
        url = json.loads(path.read_text())["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"cannot read the settings: {path}", str(error), hint=f"${{EDITOR:-vi}} {path}") from error


def _uid_of(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return os.geteuid()


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
