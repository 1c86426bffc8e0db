"""Constants of VAE calls that the UI process and the ranks share."""

VAE_METHODS = ("decode", "encode")
EXACT, TILES = "exact", "tiles"
INPUT = "vae_input"
"""Argument that ranks leave in the memory of the message: each copies only its part. `exact`: a tensor; `tiles`: a list."""
