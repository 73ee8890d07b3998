"""The DNS forwarder: what a sandbox's questions become. One process serves all sandboxes (`workers/dns.py`)."""
