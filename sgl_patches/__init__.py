"""One file per upstream target: what is hooked, why, and what would let us drop it."""
