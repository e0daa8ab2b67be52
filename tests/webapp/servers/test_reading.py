"""What is read of a server: engines by their own figures, and servers with bad manners."""

import asyncio
import functools
import math
import tracemalloc

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp.servers import fakes
from tests.webapp.servers.fakes import Figures, fake_server
from webapp.servers import reading
from webapp.servers.engines import Histogram, Reading, read_metrics
from webapp.servers.figures import WINDOW_SECONDS, History
from webapp.servers.reading import Served, Target, UnreadableError, look_at


@pytest.fixture
def fake():
    with fake_server() as found:
        yield found


def look(target: Target):
    return asyncio.run(look_at(target))


def _pages(engine: str) -> tuple[str, str]:
    """Return an engine's page after 3 requests, and after 8 of them."""
    if engine in {"vllm", "sglang"}:
        figures = Figures(Figures.VLLM if engine == "vllm" else Figures.SGLANG)
        figures.serve(3)
        before = figures.text()
        figures.serve(5)
        figures.of["preempted"].inc(2)
        return before, figures.text()
    page = {"llamacpp": fakes.llamacpp, "tgi": fakes.tgi}[engine]
    return page(3), page(8)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "tgi"])
def test_figures_of_an_engine_are_what_came_between_two_pages(engine):
    before, after = _pages(engine)
    history = History()
    first = history.add(read_metrics(before)[1], at=0.0)
    assert first.figures.keys() <= {"running_requests", "waiting_requests", "kv_cache_used_ratio"}
    found, read = read_metrics(after)
    progress = history.add(read, at=10.0)
    assert found is not None
    assert found.name == engine
    expected = {
        "running_requests": 2, "waiting_requests": 1, "prompt_tokens_per_second": 50.0,
        "tokens_per_second": 5.5, "tpot_seconds": 0.03,
    }  # fmt: skip
    if engine != "llamacpp":
        expected |= {"requests_per_second": 0.5, "latency_seconds": 0.45}
    if engine in {"vllm", "sglang"}:
        expected |= {"kv_cache_used_ratio": 0.25, "preemptions": 2, "prefix_hit_ratio": 0.5,
                     "ttft_seconds": 0.15, "ttft_p50_seconds": 0.15, "ttft_p95_seconds": 0.195,
                     "tpot_p95_seconds": 0.039}  # fmt: skip
    for name, value in expected.items():
        assert progress.figures[name] == pytest.approx(value), name
    window = progress.window
    assert (window.seconds, window.in_flight, window.busy_ratio) == (10.0, 3.0, 1.0)
    if engine != "llamacpp":
        assert (window.requests, window.input_tokens, window.output_tokens) == (5.0, 100.0, 11.0)
    assert (progress.figures.keys() & {"ttft_seconds"} != set()) == (engine in {"vllm", "sglang"})


def test_older_names_are_read_too():
    old = {
        "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache": "vllm:gpu_prefix_cache",
        "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    }
    figures = Figures(Figures.VLLM)
    figures.serve(2)
    text = figures.text()
    for new, name in old.items():
        text = text.replace(new, name)
    assert read_metrics(text)[1] == read_metrics(figures.text())[1]


def test_replicas_of_one_engine_are_summed_but_the_fullest_cache_counts():
    rows = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    rows += 'vllm:kv_cache_usage_perc{engine="0"} 0.9\nvllm:kv_cache_usage_perc{engine="1"} NaN\n'
    assert read_metrics(rows)[1].gauges == {"running": 7.0, "kv_used": 0.9}


def test_a_restarted_server_begins_anew():
    """Its counters fall: nothing is negative, and no figure spans the restart."""
    history, figures = History(), Figures(Figures.VLLM)
    figures.serve(30)
    history.add(read_metrics(figures.text())[1], 0.0)
    figures.serve(2)
    assert history.add(read_metrics(figures.text())[1], 10.0).window.requests == 2
    for served in (1, 31):  # fewer than before, and as many tokens but slower
        anew = Figures(Figures.VLLM)
        anew.serve(served, ttft=0.015 if served == 31 else 0.15)
        progress = history.add(read_metrics(anew.text())[1], 20.0)
        assert "tokens_per_second" not in progress.figures, served
        assert progress.window.figures == {}, served
        figures.serve(1)
        history.add(read_metrics(figures.text())[1], 25.0)


def test_a_window_forgets_what_is_older():
    history, figures = History(), Figures(Figures.VLLM)
    steps = int(WINDOW_SECONDS // 60) + 5
    for minute in range(steps):
        figures.serve(10, running=0 if minute % 2 else 2)
        window = history.add(read_metrics(figures.text())[1], 60.0 * minute).window
    assert (window.seconds, window.requests) == (WINDOW_SECONDS, 10 * WINDOW_SECONDS / 60)
    assert window.in_flight == pytest.approx((3 * 6 + 1 * 5) / 11)  # one waits at every look


@given(
    st.lists(st.floats(0.001, 30.0), min_size=1, max_size=30),
    st.floats(0.01, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_estimates(values, share):
    bounds = (*Figures.BOUNDS, math.inf)
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    low, high = max((0.0, *(b for b in bounds if b < true))), min(b for b in bounds if b >= true)
    found = Histogram(bounds, counts, sum(values)).quantile(share)
    assert found is not None
    assert low <= found <= (low if math.isinf(high) else high)


@pytest.mark.parametrize(
    ("engine", "release", "longest"),
    [("vllm", "0.33.0", 2048), ("sglang", "0.5.23", 2048), ("llamacpp", "b9000-abc", 1024),
     ("tgi", "3.3.6", 4096), ("ollama", "0.12.6", 2048), ("proxy", "", 2048)],
)  # fmt: skip
def test_engine_and_release_are_known_without_figures_too(fake, engine, release, longest):
    fake.be(engine, None)
    found = look(Target(fake.url))
    assert (found.engine, found.release) == ("" if engine == "proxy" else engine, release)
    assert found.models == (Served("tiny", "acme/tiny", longest),)
    assert found.reading is None
    assert "/metrics answers with status 404" in found.note
    switch = {"sglang": "--enable-metrics", "llamacpp": "--metrics"}.get(engine, "")
    assert switch in found.note


def test_a_name_acts_on_no_terminal(fake):
    fake.be("vllm", None, id="tiny\x1b]0;owned\x07", root="acme\u202egnp")
    found = look(Target(fake.url)).models[0]
    assert (found.name, found.root) == ("tiny�]0;owned�", "acme�gnp")


def test_a_server_that_shows_figures_alone_is_read(fake):
    fake.answers = {"/metrics": fakes.tgi(3)}
    found = look(Target(fake.url))
    assert (found.engine, found.models) == ("tgi", ())
    assert "/v1/models answers with status 404" in found.note


@pytest.mark.parametrize(
    ("models", "metrics", "words"),
    [
        (fakes.slow, "", "did not answer within"),
        (fakes.endless, "", "more than 1,024 KiB"),
        ("<html>Welcome</html>", "", "something else than JSON"),
        ("[" * 100_000, "", "something else than JSON"),
        ("[]", "", "JSON that is no object"),
        ('{"data": "none"}', "", "without a list of models"),
        (fakes.redirect_to("http://127.0.0.1:1/v1/models"), "", "redirects to http://127.0.0.1:1/"),
        ('{"data": []}', fakes.endless, "more than 2,048 KiB"),
        ('{"data": []}', "<html>Welcome</html>", "not Prometheus text"),
        ('{"data": []}', 'vllm:x{le="1} 2\n' * 3, "not Prometheus text"),
        ('{"data": []}', "# TYPE go_threads gauge\ngo_threads 3\n", "none of an engine"),
        ('{"data": [{"id": 7, "root": {}, "max_model_len": "long"}, 3]}', "", "status 404"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_manners_are_named_and_bounded(fake, monkeypatch, models, metrics, words):
    monkeypatch.setattr(reading, "LOOK_SECONDS", 0.5 if models is fakes.slow else 8.0)
    fake.answers = {"/v1/models": models} | ({"/metrics": metrics} if metrics else {})
    tracemalloc.start()
    try:
        found = look(Target(fake.url)).note
    except UnreadableError as error:
        found = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert words in found
    assert peak < 64 * 2**20


def test_a_key_goes_to_the_named_address_alone(fake):
    with fake_server() as other:
        fake.answers = {"/v1/models": fakes.redirect_to(f"{other.url}/v1/models")}
        with pytest.raises(UnreadableError, match="not followed"):
            look(Target(fake.url, key="sk-of-the-team"))
        assert other.seen == []
    assert {key for _, key in fake.seen} == {"Bearer sk-of-the-team"}
    assert "sk-of" not in repr(Target(fake.url, key="sk-of-the-team"))
    for key in ("two\nlines", "a b", "schlüssel"):
        with pytest.raises(UnreadableError, match="cannot be sent as a key"):
            look(Target(fake.url, key=key))


def test_a_link_local_address_is_not_read():
    """Also that of a name: the address counts that was connected to."""

    class Stream:
        def get_extra_info(self, name: str):
            return (self.address, 80) if name == "server_addr" else None

    for address, is_read in (
        ("169.254.169.254", False),
        ("fe80::1%eth0", False),
        ("10.0.0.5", True),
    ):
        stream = Stream()
        stream.address = address
        transport = httpx.MockTransport(lambda _, stream=stream: _answer(stream))
        looked = functools.partial(asyncio.run, look_at(Target("http://metadata"), transport))
        if is_read:
            assert looked().models == (), address
        else:
            with pytest.raises(UnreadableError, match="link-local"):
                looked()


def _answer(stream: object) -> httpx.Response:
    """Return an answer over a stream; unlike one with content, it can be streamed."""
    body = httpx.ByteStream(b'{"data": []}')
    return httpx.Response(200, stream=body, extensions={"network_stream": stream})


def test_nobody_listens():
    with fake_server() as gone:
        url = gone.url
    with pytest.raises(UnreadableError, match="No connection"):
        look(Target(url))


def test_a_page_that_is_no_histogram_gives_no_percentile():
    falling = 'vllm:time_to_first_token_seconds_bucket{le="1"} 5\n'
    falling += 'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4\n'
    unbounded = 'vllm:time_to_first_token_seconds_bucket{le="1"} 5\n'
    for text in (falling, unbounded):
        assert read_metrics(text)[1] == Reading()
