"""What Linux and Windows do differently: memory that processes share, ranks' processes, and semaphores between them.

`posix` and `windows` have the same names. Nothing else in this package asks for the system. The other modules serve all systems:
`environment`, `programs`, `interfaces` and `native` are the only ones of this package to use what their first lines say.
"""

import sys

if sys.platform == "win32":
    from . import windows as system
else:
    from . import posix as system

HAS_POOLS = sys.platform in ("linux", "win32")
"""Whether ranks can run here."""
HAS_MACHINES = sys.platform == "linux"
"""Whether other computers can join."""

__all__ = ["HAS_MACHINES", "HAS_POOLS", "system"]
