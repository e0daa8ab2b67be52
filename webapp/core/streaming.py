"""Chunks of a streamed response, read in threads."""

from collections.abc import AsyncIterator, Iterator

from asgiref.sync import sync_to_async


async def in_threads(
    pieces: Iterator[bytes], *, is_one_thread: bool = False
) -> AsyncIterator[bytes]:
    """Yield the chunks, reading them in threads so that the event loop is not blocked.

    With ``is_one_thread`` it is the request's own thread, which has the database's connection.
    """

    def read() -> bytes | None:
        return next(pieces, None)

    while (piece := await sync_to_async(read, thread_sensitive=is_one_thread)()) is not None:
        yield piece
