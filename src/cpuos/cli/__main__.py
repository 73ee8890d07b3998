"""`python -m cpuos.cli` is `cpuos`."""

from cpuos.cli import run

if __name__ == "__main__":
    raise SystemExit(run())
