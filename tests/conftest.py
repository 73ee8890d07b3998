"""Fixtures of a private instance: real sandboxes where the machine can, the fake runtime elsewhere."""

import signal

# A shell starts background work with SIGINT ignored, and that is inherited: tests of Ctrl-C mean the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["cpuos.testing.fixtures"]
