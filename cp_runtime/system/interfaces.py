"""Network interfaces of this computer, on every system."""


def interface_of(address: str, otherwise: str) -> str:
    """Return the name of the interface with an address. `otherwise`: where none has it."""
    import psutil  # a requirement of ComfyUI, and of nothing else here

    found = (name for name, each in psutil.net_if_addrs().items() if any(own.address == address for own in each))
    return str(next(found, otherwise))
