"""The two servers that benchmark.gateway_cost compares, each in a process of its own."""
