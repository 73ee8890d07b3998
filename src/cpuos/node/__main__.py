"""`python -m cpuos.node`: the node daemon."""

from cpuos.node.daemon import main

main()
