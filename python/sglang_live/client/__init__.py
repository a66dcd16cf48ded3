"""A client: speaks a recording into /v1/realtime and measures the responses.

`python -m sglang_live.client` is the command; benchmark/ uses the same RealtimeClient.
"""
