"""Twilio: a number's calls are answered by the server. Needs nothing but Python.

python docs/examples/twilio_answer.py wss://voice.example --port 8080

Run the server with `--telephony-url wss://voice.example`, and Twilio's auth token in
SGLANG_LIVE_TELEPHONY_TOKEN; name this program's public address as the number's webhook.
"""

import argparse
from http.server import BaseHTTPRequestHandler, HTTPServer
from xml.sax.saxutils import quoteattr


class Webhook(BaseHTTPRequestHandler):
    server_url: str

    def do_POST(self) -> None:
        """A call has come in: Twilio is told to connect it to the server's socket."""
        url = quoteattr(f"{self.server_url}/v1/telephony/twilio")
        twiml = f"<Response><Connect><Stream url={url}/></Connect></Response>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(twiml)))
        self.end_headers()
        self.wfile.write(twiml)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="the server's address for Twilio, wss://…")
    parser.add_argument("--host", default="127.0.0.1", help="behind a proxy with TLS")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    Webhook.server_url = args.url.rstrip("/")
    with HTTPServer((args.host, args.port), Webhook) as server:
        print(f"http://{args.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
