"""Data plane beside each node: commands, files and terminals, from clients to agents. Unprivileged, no database."""
