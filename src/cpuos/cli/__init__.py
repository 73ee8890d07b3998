"""The `cpuos` command: one file a group of commands, built on the public SDK."""
