"""Whether a server speaks OpenAI's Realtime and Live APIs, any server.

It needs websockets and the types of the package openai, and nothing else of this package.
"""
