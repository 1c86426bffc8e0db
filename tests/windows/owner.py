"""Owns a pool: prints the numbers of its ranks' processes as soon as there are some, then "ready", and waits."""

import sys
import threading
import time
from pathlib import Path

sys.path[:] = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
from support.package import load_package

load_package()
from support.pools import make_pool

pool = make_pool()


def tell() -> None:
    while len(pool.processes) < 2 or not all(pool.pids):
        time.sleep(0.01)
    print(*pool.pids, flush=True)


threading.Thread(target=tell).start()
pool.start()
print("ready", flush=True)
time.sleep(600)
