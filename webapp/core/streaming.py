"""Chunks of a streamed response, read in threads; files, also a range of one."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from asgiref.sync import sync_to_async
from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse

from webapp.core.problems import BYTES_TYPE

PIECE_BYTES = 1024**2
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")  # one range with a beginning


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


def file_response(path: Path, wanted: str) -> HttpResponseBase:
    """Return a file, or the part of it that a Range header names (RFC 9110, section 14).

    A header of another form is ignored, as a server may; a range behind the end is a 416.
    """
    size = path.stat().st_size
    match = RANGE.fullmatch(wanted.strip())
    start, end = 0, size
    if match:
        start = int(match[1])
        end = min(size, int(match[2]) + 1) if match[2] else size
        if start >= end:
            return HttpResponse(status=416, headers={"Content-Range": f"bytes */{size}"})
    response = StreamingHttpResponse(
        in_threads(_file_pieces(path, start, end)),
        content_type=BYTES_TYPE,
        status=206 if match else 200,
    )
    response["Content-Length"] = str(end - start)
    response["Accept-Ranges"] = "bytes"
    if match:
        response["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return response


def _file_pieces(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (piece := file.read(min(PIECE_BYTES, end - start))):
            start += len(piece)
            yield piece
