"""A switch before web processes, as a site's proxy is: a connection goes to one of several.

It passes bytes on and knows no HTTP. A connection that a server does not take goes to the next;
one that a server breaks is broken for its client too.
"""

import asyncio
import contextlib
import itertools
import threading


class Switch:
    """One address; ``targets`` are the ports behind it, and may change at any time."""

    def __init__(self, *targets: int) -> None:
        self.targets = targets
        self.port = 0
        self.taken: dict[int, int] = {}  # connections by port
        self._turn = itertools.count()
        self._kept: set[object] = set()
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Switch":
        self._thread.start()
        self._is_up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(30)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._pass, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        self._loop.run_forever()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A loop refers to its tasks weakly: one that nothing else holds may vanish as it waits.
        self._kept.add(task := asyncio.current_task())
        try:
            await self._serve(reader, writer)
        finally:
            self._kept.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            targets, first = self.targets, next(self._turn)
            for number in range(len(targets)):
                port = targets[(first + number) % len(targets)]
                try:
                    theirs, ours = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    continue
                self.taken[port] = self.taken.get(port, 0) + 1
                with contextlib.closing(ours):
                    sent = asyncio.ensure_future(_copy(reader, ours))
                    await _copy(theirs, writer)  # the server decides when a connection is over
                    sent.cancel()
                return


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
