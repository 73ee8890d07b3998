"""What is written down of connections: what the kernel logged and counted, joined with what forwarder and peek tell."""
