"""Session KV under pressure (workload W3): who needs which tokens when, and the offline limit."""
