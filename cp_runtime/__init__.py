"""Context parallelism: sharded attention, sharding plans and the worker pool. Imports without ComfyUI."""
