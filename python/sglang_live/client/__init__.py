"""A client that speaks a recording into /v1/realtime and plays the response: the command
`python -m sglang_live.client`.
"""
