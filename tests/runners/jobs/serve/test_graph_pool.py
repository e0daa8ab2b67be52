"""A function is captured once and then replayed; a failed capture names its own cause."""

import contextlib

import pytest
import torch

from runners.jobs.serve.padded_decode import CaptureError, GraphPool

GPU = torch.device("cuda")


class Stream:
    def wait_stream(self, _other):
        return None


@pytest.fixture
def seen(monkeypatch):
    """Replace what torch asks of a driver; return what was captured, replayed and set."""
    calls = []

    class Graph:
        def pool(self):
            return (0, 7)

        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def capture(_graph, pool, stream, capture_error_mode):
        calls.append(("capture", pool))
        try:
            yield
        except RuntimeError:  # as torch's own: the end of the capture raises as well
            raise RuntimeError("operation failed due to a previous error") from None

    current, sizes = Stream(), iter((100, 130, 130, 170))
    replaced = {
        "Stream": lambda _device: Stream(),
        "current_stream": lambda _device: current,
        "set_stream": lambda stream: calls.append(stream is current),
        "stream": lambda _stream: contextlib.nullcontext(),
        "synchronize": lambda _device: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _device: next(sizes),
        "CUDAGraph": Graph,
        "graph": capture,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


def test_a_function_is_captured_once_in_the_pool_of_the_first(seen):
    pool, runs = GraphPool(GPU), []

    for key in ("a", "b", "a"):
        pool.run(key, lambda: runs.append(1))

    assert seen == [("capture", None), "replay", ("capture", (0, 7)), "replay", "replay"]
    assert len(runs) == 4  # once before each capture, once in it
    assert (len(pool), pool.bytes) == (2, 70)


@pytest.mark.parametrize("failing_run", [1, 2])
def test_a_failed_capture_names_the_cause_and_leaves_the_current_stream(seen, failing_run):
    runs = []

    def full():
        runs.append(1)
        if len(runs) == failing_run:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB")

    pool = GraphPool(GPU)
    with pytest.raises(CaptureError, match=r"^CUDA out of memory\.$"):
        pool.run("a", full)

    assert len(pool) == 0
    assert seen == ([] if failing_run == 1 else [("capture", None), True])


def test_a_cpu_calls_the_function(seen):
    pool, runs = GraphPool(torch.device("cpu")), []

    pool.capture("a", lambda: runs.append("captured"))
    pool.run("a", lambda: runs.append("called"))

    assert (runs, seen) == (["called"], [])
