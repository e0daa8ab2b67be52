"""Caches of prompts that one engine keeps for another: read once over a real socket, then freed.

As vLLM's own connector has it: who reads keeps the cache under its engine, its request and its
blocks; who writes fetches it there by all three, and what was fetched is gone.
"""

import json
import os
import socketserver
import threading
import uuid
from socket import create_connection
from typing import Any

BLOCK_WORDS = 2
FIELDS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)


class RefusedError(Exception):
    """A cache that is not there, not whole, or not asked for as it must be."""


class Caches(socketserver.ThreadingTCPServer):
    """What one engine keeps, and the port on which others fetch it."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.engine_id = str(uuid.uuid4())
        self.kept: dict[str, tuple[list[int], list[str]]] = {}
        self.fetched = 0
        self._block = 0
        self._lock = threading.Lock()
        super().__init__((host, port), Fetching)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def blocks_held(self) -> int:
        """Return how many blocks are kept now."""
        return sum(len(blocks) for blocks, _ in self.kept.values())

    def keep(self, request: str, words: list[str]) -> dict[str, Any]:
        """Keep a prompt's cache; return what another engine must know to fetch it."""
        with self._lock:
            count = -(-len(words) // BLOCK_WORDS)
            blocks = list(range(self._block, self._block + count))
            self._block += count
            self.kept[request] = (blocks, words)
        host, port = self.server_address[:2]
        found = (self.engine_id, request, host, port, [blocks])
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **dict(zip(FIELDS, found, strict=True)),
        }

    def give(self, asked: dict[str, Any]) -> list[str]:
        """Hand a cache over and free it."""
        if "STANDIN_HANDS_NOTHING_OVER" in os.environ:
            raise RefusedError("no way to that memory")
        if asked["engine"] != self.engine_id:
            raise RefusedError("another engine's cache is asked for")
        with self._lock:
            blocks, words = self.kept.get(asked["request"], ([], []))
            if not blocks or asked["blocks"] not in ([blocks], []):
                raise RefusedError("no such blocks are kept here")
            del self.kept[asked["request"]]
            self.fetched += bool(asked["blocks"])
        return words


class Fetching(socketserver.StreamRequestHandler):
    """One cache on its way."""

    server: Caches

    def handle(self) -> None:
        """Answer with the cache, or with why it is not given."""
        try:
            said: Any = {"words": self.server.give(json.loads(self.rfile.readline()))}
        except (RefusedError, KeyError) as error:
            said = {"refused": str(error)}
        self.wfile.write(json.dumps(said).encode() + b"\n")


def fetch(params: dict[str, Any], *, only_free: bool = False) -> list[str]:
    """Return the words whose cache another engine keeps, or have it freed unread."""
    if missing := [name for name in FIELDS if params.get(name) is None]:
        raise RefusedError(f"kv_transfer_params lack {missing[0]}")
    place = (params["remote_host"], int(params["remote_port"]))
    asked = {"engine": params["remote_engine_id"], "request": params["remote_request_id"],
             "blocks": [] if only_free else params["remote_block_ids"]}  # fmt: skip
    with create_connection(place, timeout=10) as sock, sock.makefile("rwb") as stream:
        stream.write(json.dumps(asked).encode() + b"\n")
        stream.flush()
        said = json.loads(stream.readline())
    if "refused" in said:
        raise RefusedError(said["refused"])
    return list(said["words"])
