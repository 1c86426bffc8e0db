"""Runs with Windows' Python, under Wine or on a real Windows; `make windows` has the former."""

import os

collect_ignore_glob = [] if os.name == "nt" else ["test_*.py"]
