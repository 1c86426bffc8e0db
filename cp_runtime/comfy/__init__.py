"""Everything that touches ComfyUI."""
