"""How messages and tensors travel between processes, on one host or between hosts."""
