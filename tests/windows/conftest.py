"""Runs with Windows' Python, under Wine or on a real Windows; `make windows` has the former."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.name == "nt" else ["test_*.py"]
if os.name == "nt":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `support`
    from support.package import load_package

    load_package()
