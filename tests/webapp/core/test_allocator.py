"""The allocator's settings, in a process of their own: they hold for good."""

import asyncio
import subprocess
import sys

import pytest

from webapp import asgi

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these settings")
# Blocks of growing sizes are taken and freed, the last of each below a small one that stays.
BURST = """
import psutil
from webapp.core import logs as allocator

if {is_set}:
    assert allocator.give_back_memory()
own, kept = psutil.Process(), []
before = own.memory_info().rss
for _ in range(30):
    blocks = [bytearray(size) for size in range(200_000, 4_000_000, 200_000)]
    kept.append([bytes(5_000) for _ in range(40)])
    del blocks
print((own.memory_info().rss - before) / 1e6)
"""


def growth_mb(*, is_set: bool) -> float:
    found = subprocess.run(
        [sys.executable, "-c", BURST.format(is_set=is_set)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(found.stdout)


@LINUX
def test_large_blocks_that_were_freed_are_given_back():
    assert growth_mb(is_set=True) < 15 < growth_mb(is_set=False)


# Blocks too large for Python's own allocator, each second one freed: no end of the heap is free.
HOLES = """
import psutil
from webapp.core import logs as allocator

assert allocator.give_back_memory()
own = psutil.Process()
blocks = [bytearray(60_000) for _ in range(1000)]
for block in blocks:
    block[:] = b"x" * len(block)
kept = blocks[::2]
del blocks, block
before = own.memory_info().rss
assert allocator.trim()
print((before - own.memory_info().rss) / 1e6)
"""


@LINUX
def test_free_pages_between_used_ones_are_given_back():
    done = subprocess.run(
        [sys.executable, "-c", HOLES], check=True, capture_output=True, text=True
    )
    assert float(done.stdout) > 15


# A cycle that reached the oldest generation, which the collector seldom looks at by itself.
CYCLE = """
import gc, weakref
from webapp.core import logs as allocator

class Node: pass

allocator.freeze_loaded()
assert gc.get_freeze_count() > 1000
one, other = Node(), Node()
one.other, other.other = other, one
gc.collect()
gone = weakref.ref(one)
del one, other
gc.collect(1)
assert gone() is not None
allocator.collect_and_trim()
assert gone() is None
"""


def test_cycles_are_freed_however_much_a_process_has_loaded():
    subprocess.run([sys.executable, "-c", CYCLE], check=True)


@pytest.mark.asyncio
async def test_a_server_collects_while_it_runs(monkeypatch):
    frozen: list[str] = []
    collected = asyncio.Event()
    monkeypatch.setattr(asgi, "COLLECT_SECONDS", 0)
    monkeypatch.setattr(asgi, "collect_and_trim", collected.set)
    monkeypatch.setattr(asgi, "freeze_loaded", lambda: frozen.append("once"))
    monkeypatch.setattr(asgi, "_schema_refusal", str)
    monkeypatch.setattr(asgi, "end_streams_on_signals", list)
    received: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    sent: list[str] = []

    async def send(message: dict[str, str]) -> None:
        sent.append(message["type"])

    serving = asyncio.create_task(asgi._lifespan(received.get, send))
    async with asyncio.timeout(10):
        await received.put({"type": "lifespan.startup"})
        await collected.wait()
        await received.put({"type": "lifespan.shutdown"})
        await serving
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert frozen == ["once"]
