"""Session KV under pressure (workload W3): accesses of sessions, and the offline optimum."""
