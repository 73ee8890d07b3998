"""`python -m cpuos.setup`: prepares this machine; what `make` and `cpuos setup` call."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from cpuos.errors import CpuosError, SetupRequired
from cpuos.settings import Settings, load_settings
from cpuos.setup.engine import set_up
from cpuos.setup.golang import find_go, install_go
from cpuos.setup.host import Host
from cpuos.setup.microvm import KernelSource
from cpuos.setup.progress import choose_progress
from cpuos.setup.steps import all_steps
from cpuos.setup.templates import choose_templates

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run set-up; 0 when everything is in place."""
    parser = argparse.ArgumentParser(prog="cpuos setup", description="Install and build what cpuOS needs.")
    parser.add_argument("--host-ca", action="store_true", help="carry this machine's CA bundle into the templates")
    parser.add_argument("--host-mirrors", action="store_true", help="carry its package mirrors into the templates")
    parser.add_argument("--example", action="store_true", help="also fetch the table that `make demo` analyses")
    parser.add_argument("--template", action="append", default=[], metavar="NAME", help="also build this template")
    parser.add_argument("--templates", action="store_true", help="build all templates")
    parser.add_argument("--microvm", action="store_true", help="also install and make what microVMs need")
    parser.add_argument("--go", action="store_true", help="only see that there is a Go toolchain, and print its path")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        if os.geteuid() != 0:
            raise SetupRequired(
                "cannot set up cpuOS: not root", "it installs packages, users and templates", hint="sudo make setup"
            )
        carried = {"template_host_ca": options.host_ca, "template_host_mirrors": options.host_mirrors}
        settings = load_settings(**{name: True for name, wanted in carried.items() if wanted})
        if options.go:
            print(_go_toolchain(settings))
            return 0
        templates = choose_templates(options.template, all_of_them=options.templates)
        kernel = KernelSource() if options.microvm else None
        steps = all_steps(example=options.example, templates=templates, guest_kernel=kernel)
        done = set_up(settings, steps, progress=choose_progress(sys.stderr), hint="make setup")
    except CpuosError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up was interrupted; the next run continues where it stopped", file=sys.stderr)
        return 130
    spent = time.monotonic() - started
    print(f"set-up: {f'{len(done)} steps done' if done else 'everything is in place'} ({spent:.1f} s)", file=sys.stderr)
    return 0


def _go_toolchain(settings: Settings) -> Path:
    with open(os.devnull, "w") as log:
        host = Host(settings, log=log)
        if find_go(host) is None:
            install_go(host)
        found = find_go(host)
    assert found is not None
    return found


if __name__ == "__main__":
    sys.exit(main())
