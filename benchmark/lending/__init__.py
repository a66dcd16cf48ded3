"""KV of a busy stage in the idle memory of another: see __main__.py."""
