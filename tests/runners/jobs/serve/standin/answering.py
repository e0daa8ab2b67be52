"""What servers in the place of engines have in common: one that listens, and whole answers."""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answering(BaseHTTPRequestHandler):
    """Sends whole answers; what is answered is each engine's own."""

    def say(self, status: int, body: dict[str, Any] | str) -> None:
        """Send a whole answer, as JSON unless it is text."""
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def answer_for_good(handler: type[Answering], told: argparse.Namespace) -> None:
    """Listen where the arguments say, and answer until the process is ended."""
    ThreadingHTTPServer((told.host, int(told.port)), handler).serve_forever()
