from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from test.unit.client.claims import ClientClaims


class TestRealtimeClient(ClientClaims):
    client = RealtimeClient
    options = LoadOptions

    async def test_an_early_response_is_counted(self, fake_server, fast_clock, speech):
        record = await self.after_an_early_response(fake_server, fast_clock, speech)
        assert record.early_replies == 1
