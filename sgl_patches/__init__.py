"""One file per upstream target: what is hooked, why, and when the hook can be dropped."""
