"""Fixtures of a private instance: real sandboxes where the machine can, the fake runtime elsewhere."""

pytest_plugins = ["cpuos.testing.fixtures"]
