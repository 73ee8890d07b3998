"""Where an installation keeps what: paths below its three directories, each named once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

__all__ = ["Places"]


class Places:
    """What `Settings` has of paths."""

    if TYPE_CHECKING:  # fields of Settings
        data_dir: Path
        state_dir: Path
        run_dir: Path

    # --- artifacts, in the data directory ---

    @property
    def agent_dir(self) -> Path:
        """Folder mounted at `/.cpuos` in every sandbox; holds only the agent."""
        return self.data_dir / "bin" / "agent"

    @property
    def agent_path(self) -> Path:
        """The guest agent."""
        return self.agent_dir / "cpuos-agent"

    @property
    def template_dir(self) -> Path:
        """Holds `<name>/root.erofs` and `<name>/manifest.json`."""
        return self.data_dir / "templates"

    @property
    def cache_dir(self) -> Path:
        """Downloads and build caches; may be removed at any time."""
        return self.data_dir / "cache"

    @property
    def venv_dir(self) -> Path:
        """The installed package that the daemons run from."""
        return self.data_dir / "venv"

    # --- state that must survive ---

    @property
    def node_state_dir(self) -> Path:
        """root, 0700."""
        return self.state_dir / "node"

    @property
    def gateway_state_dir(self) -> Path:
        """cpuos-gateway, 0700."""
        return self.state_dir / "gateway"

    @property
    def server_state_dir(self) -> Path:
        """cpuos-server, 0700."""
        return self.state_dir / "server"

    @property
    def audit_archive_dir(self) -> Path:
        """Audit entries that have left the database, by month."""
        return self.server_state_dir / "audit"

    @property
    def microvm_dir(self) -> Path:
        """What microVMs start from: `vmlinux`, `initrd`, `manifest.json`."""
        return self.data_dir / "microvm"

    @property
    def network_state_dir(self) -> Path:
        """cpuos-network, 0700."""
        return self.state_dir / "network"

    @property
    def log_dir(self) -> Path:
        """One log file a daemon."""
        return self.state_dir / "logs"

    @property
    def node_identity_key(self) -> Path:
        """The node's Ed25519 key that signs identity statements."""
        return self.node_state_dir / "identity.key"

    @property
    def server_ticket_key(self) -> Path:
        """The server's Ed25519 key that signs tickets."""
        return self.server_state_dir / "ticket.key"

    @property
    def users_made(self) -> Path:
        """Set-up's note of the system users that it made, so that `uninstall` removes no others."""
        return self.data_dir / "users-made.txt"

    @property
    def keys_handed_over(self) -> Path:
        """Root's note of the files that `up` wrote a key to, so that `uninstall` takes no other installation's key."""
        return self.state_dir / "keys-handed-over.json"

    # --- the run directory: 0750 root:cpuos; each unprivileged daemon owns a folder below it (0750, group cpuos) ---

    @property
    def node_socket(self) -> Path:
        """The node's API; peers allowed: root and the server."""
        return self.run_dir / "node.sock"

    @property
    def dial_socket(self) -> Path:
        """Where the gateway gets its sockets to agents; peers allowed: root and the gateway."""
        return self.run_dir / "dial.sock"

    @property
    def gateway_run_dir(self) -> Path:
        """The gateway's own folder in the run directory."""
        return self.run_dir / "gateway"

    @property
    def server_run_dir(self) -> Path:
        """The server's own folder in the run directory."""
        return self.run_dir / "server"

    @property
    def network_run_dir(self) -> Path:
        """Holds the socket of the record of connections; root's, since the node listens there for its worker."""
        return self.run_dir / "network"

    @property
    def gateway_socket(self) -> Path:
        """The gateway's control API; peers allowed: root and the server."""
        return self.gateway_run_dir / "gateway.sock"

    @property
    def records_socket(self) -> Path:
        """Where the records of connections are read; peers allowed: root, the server and the gateway."""
        return self.network_run_dir / "network.sock"

    @property
    def server_public_key(self) -> Path:
        """Public half of the ticket key; the server writes it at each start, readable by group cpuos."""
        return self.server_run_dir / "ticket.pub"

    @property
    def first_key_file(self) -> Path:
        """`{"api_key": …}`, 0600: the server writes it at its first start; `cpuos up` hands it on and removes it."""
        return self.server_run_dir / "first-key.json"

    @property
    def server_endpoint(self) -> Path:
        """`{"url": …}` of the API, published by the server once it listens."""
        return self.server_run_dir / "endpoint.json"

    @property
    def gateway_endpoint(self) -> Path:
        """`{"url": …}` of the gateway, published by the gateway once it listens."""
        return self.gateway_run_dir / "endpoint.json"

    @property
    def preview_endpoint(self) -> Path:
        """`{"url": …}` of the preview domain, published by the gateway once it listens for visitors."""
        return self.gateway_run_dir / "previews.json"

    @property
    def endpoints(self) -> Path:
        """`{"api_url": …, "gateway_url": …}`, written by `cpuos up` when all parts are ready."""
        return self.run_dir / "endpoints.json"
