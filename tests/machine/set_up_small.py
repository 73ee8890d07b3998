"""As `make setup`, with the small template alone; run in the root directory of a machine that is made. With the word
`microvm` what `cpuos setup microvm` does is done too."""

from __future__ import annotations

import sys
from pathlib import Path

from cpuos.settings import load_settings
from cpuos.setup.engine import set_up
from cpuos.setup.microvm import KernelSource
from cpuos.setup.progress import choose_progress
from cpuos.setup.steps import all_steps
from cpuos.setup.templates import TEMPLATES


def main() -> None:
    settings = load_settings()
    kernel = KernelSource() if "microvm" in sys.argv[1:] else None
    steps = all_steps(templates=[template for template in TEMPLATES if template.name == "base"], guest_kernel=kernel)
    done = set_up(settings, steps, progress=choose_progress(sys.stderr))
    print(f"done: {', '.join(done)}")
    if "template base" in done:
        (Path(settings.cache_dir) / "templates-built").touch()


if __name__ == "__main__":
    main()
