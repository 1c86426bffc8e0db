"""What the UI process and the ranks must agree on about a call of a VAE."""

VAE_METHODS = ("decode", "encode")
EXACT, TILES = "exact", "tiles"
INPUT = "vae_input"
"""Argument that ranks leave in the memory of the message: each copies only what it works on. `exact`: a tensor; `tiles`: a list."""
