"""A minimal voice server of the same stack: reads events and sends as much audio back.

    python -m benchmark.gateway_servers.echo DELTA_BYTES OUT_PER_IN

It parses every append, and encodes and sends a delta whenever the pending audio reaches the size of
one. No speech detection, no decoding, no conversation.
"""

import base64
import sys

import orjson
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from benchmark.gateway_servers.serving import serve, speech

CANNED_S = 30


def build_app(delta_bytes: int, out_per_in: float) -> FastAPI:
    app = FastAPI()
    pcm = speech(CANNED_S * 48_000)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        owed = at = 0.0
        try:
            while True:
                event = orjson.loads(await socket.receive_text())
                owed += len(event["audio"]) * 3 / 4 * out_per_in
                while owed >= delta_bytes:
                    owed -= delta_bytes
                    at = (at + delta_bytes) % (len(pcm) - delta_bytes)
                    audio = base64.b64encode(pcm[int(at) : int(at) + delta_bytes]).decode()
                    delta = {"type": "response.output_audio.delta", "delta": audio}
                    await socket.send_text(orjson.dumps(delta).decode())
        except WebSocketDisconnect:
            pass

    return app


if __name__ == "__main__":
    serve(build_app(int(sys.argv[1]), float(sys.argv[2])))
