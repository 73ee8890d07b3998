"""The uplink in user space: what leaves the hub is carried by ordinary sockets of one process (`workers/uplink.py`)."""
