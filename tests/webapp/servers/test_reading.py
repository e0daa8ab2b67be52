"""What is read of a server: engines by their own figures, and servers with bad manners."""

import asyncio
import json
import math
import tracemalloc

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp.servers import fakes
from tests.webapp.servers.fakes import Figures, fake_server
from webapp.servers import engines, reading
from webapp.servers.engines import MOST_BUCKETS, Histogram, Reading, read_metrics
from webapp.servers.figures import MOST_KEPT, WINDOW_SECONDS, History
from webapp.servers.reading import Served, Target, UnreadableError, probe


@pytest.fixture
def fake():
    with fake_server() as found:
        yield found


def local(url: str, **fields) -> Target:
    """Return a server on this machine, which a site of one machine reads."""
    return Target(url, allows_loopback=True, **fields)


def look(target: Target):
    return asyncio.run(probe(target))


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
    found = look(local(fake.url))
    assert (found.engine, found.release) == ("" if engine == "proxy" else engine, release)
    slots = 4 if engine == "llamacpp" else None
    assert found.models == (Served("tiny", "acme/tiny", longest, slots),)
    assert found.reading is None
    assert "/metrics answers with status 404" in found.note
    switch = {"sglang": "--enable-metrics", "llamacpp": "--metrics"}.get(engine, "")
    assert switch in found.note


def test_a_name_acts_on_no_terminal(fake):
    fake.be("vllm", None, id="tiny\x1b]0;owned\x07", root="acme\u202egnp")
    found = look(local(fake.url)).models[0]
    assert (found.name, found.root) == ("tiny�]0;owned�", "acme�gnp")


def test_a_server_that_shows_figures_alone_is_read(fake):
    fake.answers = {"/metrics": fakes.tgi(3)}
    found = look(local(fake.url))
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
        ('{"data": []}', "<html>Welcome</html>", "not read as Prometheus text"),
        ('{"data": []}', 'vllm:num_requests_running{le="1} 2\n' * 3, "not read as Prometheus text"),
        ('{"data": []}', "# TYPE go_threads gauge\ngo_threads 3\n", "none of an engine"),
        ('{"data": [{"id": 7, "root": {}, "max_model_len": "long"}, 3]}', "", "status 404"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:24]),
)  # fmt: skip
def test_bad_manners_are_named_and_bounded(fake, monkeypatch, models, metrics, words):
    monkeypatch.setattr(reading, "READ_SECONDS", 0.5 if models is fakes.slow else 6.0)
    fake.answers = {"/v1/models": models} | ({"/metrics": metrics} if metrics else {})
    tracemalloc.start()
    try:
        found = look(local(fake.url)).note
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
            look(local(fake.url, key="sk-of-the-team"))
        assert other.seen == []
    assert {key for _, key in fake.seen} == {"Bearer sk-of-the-team"}
    assert "sk-of" not in repr(Target(fake.url, key="sk-of-the-team"))


def test_nothing_is_sent_to_addresses_where_no_server_of_models_is():
    """Also not to one inside another address, or to the second one of a name."""
    sent = []
    transport = httpx.MockTransport(
        lambda request: (
            sent.append(request) or httpx.Response(200, stream=httpx.ByteStream(b'{"data": []}'))
        )
    )

    def read(*addresses: str, **fields):
        async def names(_host: str, _port: int) -> list[str]:
            return list(addresses)

        target = Target("https://models.example:8443", key="sk", **fields)
        return asyncio.run(probe(target, transport, names=names))

    refused = (
        "169.254.169.254", "fe80::1%eth0", "::ffff:a9fe:a9fe", "2002:a9fe:a9fe::1",
        "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "224.0.0.1",
        "ff02::1", "0.0.0.0", "::", "0.1.2.3", "255.255.255.255", "127.0.0.1", "127.9.9.9", "::1",
        "::ffff:127.0.0.1",
    )  # fmt: skip
    for address in refused:
        with pytest.raises(UnreadableError, match="Its address"):
            read("10.0.0.5", address)
    assert sent == []
    for address in ("127.0.0.1", "::1"):
        assert read(address, allows_loopback=True).models == ()
    for address in ("10.0.0.5", "fd12::5", "203.0.113.5"):
        sent.clear()
        read(address)
        assert {each.url.host for each in sent} == {address}  # the one that was checked
        assert {each.headers["Host"] for each in sent} == {"models.example:8443"}
        assert {each.extensions["sni_hostname"] for each in sent} == {"models.example"}


def test_the_next_address_of_a_name_is_taken_where_one_does_not_listen(fake):
    port = fake.url.rpartition(":")[2]

    async def names(_host: str, _port: int) -> list[str]:
        return ["::1", "127.0.0.1"]

    fake.be("vllm", None)
    target = local(f"http://models.example:{port}")
    assert asyncio.run(probe(target, names=names)).engine == "vllm"


def test_nobody_listens():
    with fake_server() as gone:
        url = gone.url
    with pytest.raises(UnreadableError, match="No connection"):
        look(local(url))


def test_a_page_that_is_no_histogram_gives_no_percentile():
    falling = 'vllm:time_to_first_token_seconds_bucket{le="1"} 5\n'
    falling += 'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4\n'
    unbounded = 'vllm:time_to_first_token_seconds_bucket{le="1"} 5\n'
    for text in (falling, unbounded):
        assert read_metrics(text)[1] == Reading()


RUNNING = "vllm:num_requests_running"
TTFT = "vllm:time_to_first_token_seconds"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RUNNING + '{a="' + '""' * 2**19 + '"} 1\n', "1,024 characters"),
        (RUNNING + "{" + ",".join(f'a{n}="b"' for n in range(17)) + "} 1\n", "16 labels"),
        ("a 1\n" * 2**17, "65,536 lines"),
        ((RUNNING + " " * 900 + "1\n") * 600, "512 KiB"),
    ],
    ids=["quotes", "labels", "lines", "samples"],
)
def test_what_takes_long_to_parse_is_refused_before(text, words, monkeypatch):
    monkeypatch.setattr(engines, "text_string_to_metric_families", None)  # not called
    with pytest.raises(ValueError, match=words):
        read_metrics(text)


def test_samples_of_no_known_name_are_not_parsed(monkeypatch):
    seen = []
    monkeypatch.setattr(
        engines, "text_string_to_metric_families", lambda text: seen.append(text) or []
    )
    read_metrics(
        '# HELP x y\n{"quoted.name"} 1\nvllm:x{a="' + '\\"' * 2**19 + f'"}} 1\n{RUNNING} 2\n'
    )
    assert seen == [f"{RUNNING} 2\n"]


def test_what_is_no_figure_is_left_out_and_every_figure_is_finite():
    """Two values of 1e308 are infinite as a sum, which is no JSON."""
    rows = f'{RUNNING}{{engine="0"}} 1e308\n{RUNNING}{{engine="1"}} 1e308\n'
    rows += f'{TTFT}_bucket{{le="NaN"}} 1\n{TTFT}_bucket{{le="-Inf"}} 1\n{TTFT}_sum 1e308\n'
    rows += "vllm:generation_tokens_total -1e308\nvllm:kv_cache_usage_perc +Inf\n"
    assert read_metrics(rows + "vllm:num_requests_waiting 1\n")[1] == Reading({"waiting": 1.0})
    history = History()
    for at, count in ((0.0, 0), (1e-9, 1)):
        page = f'{RUNNING} 1e18\n{TTFT}_bucket{{le="-1e18"}} 0\n{TTFT}_bucket{{le="1e18"}} 0\n'
        page += f'{TTFT}_bucket{{le="+Inf"}} {count * 1e-300}\n{TTFT}_sum {count * 1e18}\n'
        page += f"vllm:generation_tokens_total {count * 1e18}\n"
        page += f"vllm:e2e_request_latency_seconds_count {count * 1e-300}\n"
        progress = history.add(read_metrics(page)[1], at)
    assert progress.figures.keys() >= {"tokens_per_second", "running_requests"}
    json.dumps([progress.window.model_dump(), dict(progress.figures)], allow_nan=False)


def test_a_histogram_of_many_buckets_and_many_readings_take_no_memory():
    rows = [f'{TTFT}_bucket{{le="{n}"}} 1\n' for n in range(MOST_BUCKETS)]
    rows.append(f'{TTFT}_bucket{{le="+Inf"}} 1\n')
    assert read_metrics("".join(rows))[1].histograms == {}
    assert len(read_metrics("".join(rows[1:]))[1].histograms["ttft"].bounds) == MOST_BUCKETS
    history = History()
    for number in range(MOST_KEPT + 5):
        window = history.add(Reading({"running": 1.0}, {"output_tokens": 1.0}), number / 10).window
    assert window.seconds == pytest.approx((MOST_KEPT - 1) / 10)


def _reset(handler) -> None:
    handler.close_connection = True  # without a byte of an answer


def test_an_answer_that_breaks_off_is_of_its_path_alone(fake):
    fake.be("vllm", Figures(Figures.VLLM).text())
    fake.answers["/version"] = _reset
    found = look(local(fake.url))
    assert (found.engine, found.release, found.note) == ("vllm", "", "")
    assert found.reading is not None
    fake.answers["/metrics"] = _reset
    found = look(local(fake.url))
    assert found.note == "No figures: /metrics: the answer broke off (RemoteProtocolError)."


def test_an_optional_answer_has_a_time_of_its_own(fake, monkeypatch):
    monkeypatch.setattr(reading, "RELEASE_SECONDS", 0.2)
    fake.be("vllm", Figures(Figures.VLLM).text())
    fake.answers["/version"] = fakes.slow
    assert look(local(fake.url)).reading is not None


def test_the_engine_of_the_last_look_counts_only_where_its_address_says_so(fake):
    for engine, last, expected in (
        ("ollama", "vllm", "ollama"), ("vllm", "vllm", "vllm"), ("proxy", "sglang", ""),
    ):  # fmt: skip
        fake.be(engine, None, owned_by="somebody")
        assert look(local(fake.url, engine=last)).engine == expected, (engine, last)


def test_only_a_missing_page_asks_for_the_option_that_publishes_it(fake):
    fake.be("sglang", None)
    assert "Start SGLang with --enable-metrics." in look(local(fake.url)).note
    for answer in (_reset, "<html>", fakes.redirect_to("http://b")):
        fake.answers["/metrics"] = answer
        assert "--enable-metrics" not in look(local(fake.url)).note


def test_true_is_no_number_of_tokens(fake):
    fake.be("llamacpp", None, max_model_len=True)
    said = {
        "build_info": "b1",
        "total_slots": True,
        "default_generation_settings": {"n_ctx": True},
    }
    fake.answers["/props"] = json.dumps(said)
    assert look(local(fake.url)).models == (Served("tiny", "acme/tiny"),)


def test_the_time_of_figures_is_when_they_arrived(fake):
    times = iter([15.0, 22.0, 29.0])  # whoever asks later, gets a later time
    fake.be("vllm", Figures(Figures.VLLM).text())
    found = asyncio.run(probe(local(fake.url), clock=lambda: next(times)))
    assert found.read_at == 15.0
