"""`python -m cpuos.node`: the node daemon."""

from cpuos.node.daemon import main

if __name__ == "__main__":
    main()
