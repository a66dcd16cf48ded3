"""An engine of a simulated server: its loop, its requests, its KV, its device."""
