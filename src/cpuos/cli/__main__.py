"""`python -m cpuos.cli` is `cpuos`."""

from cpuos.cli.main import main

if __name__ == "__main__":
    main()
