"""An HTTP server that answers every request with the same bytes, then closes or stays silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from runners.shared.load_generator import RequestOutcome, Target, new_client, send_request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
END = b"data: [DONE]\n\n"
WHOLE = HEAD + TOKEN + TOKEN + USAGE + END


@contextlib.asynccontextmanager
async def answering(reply: bytes, *, hangs: bool = False) -> AsyncIterator[str]:
    """Serve on the loopback while the block runs; yield the base address."""
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        if hangs:
            await released.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        released.set()
        server.close()


async def outcome_of(url: str, patience: float = 60.0) -> RequestOutcome:
    """Return what one client sees of one request that is due now."""
    target = Target(url, "model", 2, patience)
    async with new_client() as client:
        return await send_request(client, target, (1, 2), asyncio.get_running_loop().time())


def seen(reply: bytes, patience: float = 60.0, *, hangs: bool = False) -> RequestOutcome:
    """Return what one client sees of such a server."""

    async def run() -> RequestOutcome:
        async with answering(reply, hangs=hangs) as url:
            return await outcome_of(url, patience)

    return asyncio.run(run())
