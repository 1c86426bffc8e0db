"""Two network namespaces are two computers here: `make machines` makes them, and runs these tests in the first."""

import os

BETWEEN = "CP_TEST_MACHINES"
"""Environment variable with the name of the other namespace."""

collect_ignore_glob = [] if os.environ.get(BETWEEN) else ["test_*.py"]
