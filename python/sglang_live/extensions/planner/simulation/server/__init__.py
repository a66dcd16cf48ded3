"""A simulated server: its three stages, its sessions, and a turn through them."""
