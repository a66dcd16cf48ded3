from test.unit.client.fake_server import fake_server, fast_clock, speech, stream_clock

__all__ = ["fake_server", "fast_clock", "speech", "stream_clock"]
