"""`make demo` says where other programs used the cores that it measures on."""

from __future__ import annotations

import subprocess
import sys
import time

from support.package import ROOT, load_script
from support.processes import OtherPrograms

SPIN = "import time\nwhile time.process_time() < 0.5: pass\n"  # seconds of a core, however busy the others are


def test_what_a_process_and_its_descendants_use_is_not_that_of_others():
    """One computes in a child that ends, and in itself; the other sleeps."""
    child = [sys.executable, "-c", SPIN]
    computes = f"input()\nimport subprocess; subprocess.run({child!r})\n{SPIN}print('done', flush=True); time.sleep(60)"
    programs = [[sys.executable, "-c", code] for code in (computes, "import time; time.sleep(60)")]
    busy, idle = started = [subprocess.Popen(p, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for p in programs]
    try:
        began, of_busy, of_idle = time.monotonic(), OtherPrograms(busy.pid), OtherPrograms(idle.pid)
        busy.stdin.write("\n")
        busy.stdin.flush()
        assert busy.stdout.readline() == "done\n"
        for_busy, for_idle = of_busy.cores(), of_idle.cores()
        seconds = time.monotonic() - began
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert (for_idle - for_busy) * seconds > 0.9


def test_the_demo_says_where_others_used_the_cores():
    demo = load_script(ROOT / "benchmarks" / "demo.py")
    assert demo.disturbance({1: 0.9, 2: 0.05}, 2) == demo.disturbance({1: 0.0, 4: 0.05}, 2) == ""
    said = demo.disturbance({1: 0.9, 2: 0.8}, 2)
    assert said.startswith(
        "Other programs used 0.90 beside 1 rank and 0.80 beside 2 ranks of 2 cores: this is not the ratio of an idle"
    )
    assert demo.disturbance({1: 1.2, 2: 0.0}, 2)
