"""ComfyUI's code, imported before a rank has its device: that of a ComfyUI for CPUs, which looks at no device during import."""

import comfy.options

comfy.options.enable_args_parsing()  # of the UI process's arguments

from . import mirrors  # noqa: E402, F401
