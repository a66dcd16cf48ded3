"""The two servers that benchmark.gateway_cost compares, and their users."""
