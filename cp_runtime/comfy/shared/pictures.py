"""Constants of calls of VAEs and upscale models that the UI process and the ranks share."""

UPSCALE = "upscale"
METHODS = ("decode", "encode", UPSCALE)
EXACT, TILES = "exact", "tiles"
INPUT = "pictures"
"""Argument that ranks leave in the memory of the message: each copies only its part. `exact`: a tensor; `tiles`: a list."""
CALLED = "called"
"""Argument with what is called in place of a method of the network: `shared.objects.Written.leaves`."""
