"""`python -m cpuos.setup`: prepares this machine; what `make` and `cpuos setup` call."""

from __future__ import annotations

import argparse
import os
import sys
import time

from cpuos.errors import CpuosError, SetupRequired
from cpuos.settings import load_settings
from cpuos.setup.engine import set_up
from cpuos.setup.progress import choose_progress
from cpuos.setup.steps import all_steps

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run set-up; 0 when everything is in place."""
    parser = argparse.ArgumentParser(prog="cpuos setup", description="Install and build what cpuOS needs.")
    parser.add_argument("--host-ca", action="store_true", help="carry this machine's CA bundle into the templates")
    parser.add_argument("--host-mirrors", action="store_true", help="carry its package mirrors into the templates")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        if os.geteuid() != 0:
            raise SetupRequired(
                "cannot set up cpuOS: not root", "it installs packages, users and templates", hint="sudo make setup"
            )
        carried = {"template_host_ca": options.host_ca, "template_host_mirrors": options.host_mirrors}
        settings = load_settings(**{name: True for name, wanted in carried.items() if wanted})
        done = set_up(settings, all_steps(), progress=choose_progress(sys.stderr), hint="make setup")
    except CpuosError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up was interrupted; the next run continues where it stopped", file=sys.stderr)
        return 130
    spent = time.monotonic() - started
    print(f"set-up: {f'{len(done)} steps done' if done else 'everything is in place'} ({spent:.1f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
