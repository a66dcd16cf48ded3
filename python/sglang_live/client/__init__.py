"""A caller: speaks a recording into /v1/realtime and keeps account of what comes back.

`python -m sglang_live.client` is the command; benchmark/ drives the same RealtimeClient.
"""
