"""The only rooms that import sglang are bridge/, models/ and sgl_patches/."""
