"""The browser of tests/browser: Debian's Chromium, or that of CP_CHROMIUM."""

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium: apt-get install chromium, or set CP_CHROMIUM"
