"""`python -m cpuos.services`: the supervisor, in the foreground."""

import sys

from cpuos.services.supervisor import main

sys.exit(main())
