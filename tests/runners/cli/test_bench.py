"""``slipway bench`` against a real endpoint whose delays, tokens and failures are known."""

import itertools
import json
import os
import random
import signal

import pytest
import yaml

from tests.runners.cli.endpoint import serving

SMALL = ("--input-tokens", "50", "--output-tokens", "5")
WARM_UP = 2  # requests before the measured ones
LATENCIES = ("ttft_seconds", "tpot_seconds", "itl_seconds", "latency_seconds")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("SLIPWAY_BENCH_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")


def report_of(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_latencies_and_throughput_are_the_endpoints_and_tokens_exact(slipway):
    with serving() as endpoint:
        report = report_of(
            slipway(
                "bench", endpoint.url, *SMALL, "--num-requests", "12", "--concurrency", "3",
                "--ttft-p95", "10s", "--tpot-p95", "1us", "-o", "json",
            )
        )  # fmt: skip
    assert report["endpoint"] == f"{endpoint.url}/v1"
    assert (report["model"], report["requests"], report["failed"]) == ("demo", 12, 0)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (600, 60)
    assert endpoint.most_in_flight == 3
    assert len(set(endpoint.prompts)) == 12 + WARM_UP
    slowest = {"ttft_seconds": 0.05, "tpot_seconds": 0.015, "itl_seconds": 0.015,
               "latency_seconds": 0.13}  # fmt: skip
    for name, least in slowest.items():
        figures = report[name]
        assert list(figures) == ["mean", "p50", "p90", "p95", "p99"]
        assert least <= figures["mean"] < least + 5, name  # of a machine that is busy
        assert figures["p50"] <= figures["p90"] <= figures["p95"] <= figures["p99"], name
    at_best = 3 / 0.13
    assert at_best / 100 < report["requests_per_second"] <= at_best
    assert report["output_tokens_per_second"] == pytest.approx(5 * report["requests_per_second"])
    goodput = report["goodput"]
    assert (goodput["requests_per_second"], goodput["share"]) == (0.0, 0.0)
    assert goodput["targets"]["ttft_p95_seconds"]["is_met"]
    assert not goodput["targets"]["tpot_p95_seconds"]["is_met"]


def test_a_chats_role_is_no_token_and_the_report_comes_as_table_and_yaml(slipway):
    with serving(path="/v1/chat/completions", ttft_seconds=0.1) as endpoint:
        arguments = ("bench", f"{endpoint.url}/v1/", *SMALL, "--endpoint-type", "chat",
                     "--num-requests", "4", "--concurrency", "4", "--ttft-p95", "5s")  # fmt: skip
        shown = slipway(*arguments)
        report = yaml.safe_load(slipway(*arguments, "-o", "yaml").out)
    assert report["ttft_seconds"]["p50"] >= 0.1
    assert report["total_output_tokens"] == 20
    assert report["goodput"]["share"] == 1.0
    assert shown.code == 0
    for words in ("demo at http://127.0.0.1:", "4 requests of 50 + 5 tokens, 4 concurrent", "p95",
                  "E2E latency", "Output tokens/s", "Goodput requests/s", "5 s: met",
                  "4 of 4", "4 answers are few for a p50"):  # fmt: skip
        assert words in shown.out, words


def test_lengths_are_read_as_engines_read_them(slipway):
    with serving(itl_seconds=0.0) as endpoint:
        shown = slipway("bench", endpoint.url, "--input-tokens", "1K", "--output-tokens", "1k",
                        "--num-requests", "1", "-o", "json")  # fmt: skip
    report = report_of(shown)
    assert (report["input_tokens"], report["output_tokens"]) == (1024, 1000)
    assert "--output-tokens 1k is 1,000 tokens; 1K is 1,024" in shown.err


def test_a_rate_is_a_poisson_process_that_its_seed_repeats_and_a_duration_ends(slipway):
    with serving(ttft_seconds=0.01) as endpoint:

        def sent(seed, *more):
            endpoint.prompts.clear()
            report = report_of(
                slipway("bench", endpoint.url, "--input-tokens", "50", "--output-tokens", "1",
                        "--request-rate", "60", "--seed", str(seed), "-o", "json", *more)
            )  # fmt: skip
            return report, endpoint.prompts[WARM_UP:]

        report, prompts = sent(8, "--num-requests", "40")
        _, again = sent(8, "--num-requests", "40")
        _, other = sent(3, "--num-requests", "5")
        limited, early = sent(8, "--duration", "500ms")
    source = random.Random("8")  # noqa: S311 (the instants again)
    due = list(itertools.accumulate(source.expovariate(60) for _ in range(40)))
    assert due[-1] > 0.9  # evenly spaced they would be 0.67 s
    assert due[-1] < report["duration_seconds"] < due[-1] + 60  # on a machine that is busy
    assert (report["concurrency"], report["tpot_seconds"]) == (None, None)
    assert (sorted(prompts), len(prompts)) == (sorted(again), 40)
    assert set(prompts).isdisjoint(other)
    in_time = sum(each < 0.5 for each in due)
    assert 0 < len(early) == limited["requests"] <= in_time


def test_failures_are_counted_by_kind_and_are_in_no_figure(slipway):
    statuses = {5: 429, 8: 429, 10: 503}  # by the number of the request
    with serving(failing=statuses.get) as endpoint:
        arguments = ("bench", endpoint.url, *SMALL, "--num-requests", "10", "--concurrency", "1")
        report = report_of(slipway(*arguments, "-o", "json"))
        endpoint.prompts.clear()
        shown = slipway(*arguments).out
    assert {kind: each["count"] for kind, each in report["errors"].items()} == {
        "HTTP 429": 2, "HTTP 503": 1,
    }  # fmt: skip
    assert (report["completed"], report["failed"]) == (7, 3)
    assert report["total_output_tokens"] == 35
    assert "3 of 10 requests failed, and no figure has them" in " ".join(shown.split())
    assert "answers 429: queue_full" in " ".join(shown.split())


def test_without_usage_words_and_chunks_are_counted_and_the_report_says_so(slipway):
    with serving(reports_usage=False) as endpoint:
        done = slipway("bench", endpoint.url, *SMALL, "--num-requests", "2", "-o", "json")
    report = report_of(done)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (0, 10)
    assert [len(each.split()) for each in endpoint.prompts[-2:]] == [50, 50]
    assert "reports no usage" in report["notes"][0]


def test_an_endpoint_that_has_gone_is_given_up_and_none_answered_is_status_one(slipway):
    with serving(failing=lambda number: 500 if number > WARM_UP else None) as endpoint:
        done = slipway("bench", endpoint.url, *SMALL, "--concurrency", "2", "--duration", "60s")
    assert done.code == 1
    assert "stopped after" in done.out
    assert "answered none of" in done.err


@pytest.mark.parametrize(
    ("serves", "arguments", "code", "words"),
    [
        ({"key": "k"}, (), 4, "needs an API key (HTTP 401): set SLIPWAY_BENCH_KEY"),
        ({"key": "k"}, ("--api-key", "sk-wrong"), 4, "refuses the API key (HTTP 401)"),
        ({}, ("--model", "llama"), 2, "--model is 'llama': "),
        ({"models": ["one", "two"]}, ("--model", "llama"), 2, "/v1/models lists one, two"),
        ({"models": ["one", "two"]}, (), 2, "--model is missing: "),
        ({"path": "/v1/chat/completions"}, (), 1, "try --endpoint-type chat"),
        (
            {"failing": lambda _: 400},
            (),
            1,
            "400: queue_full: Refused for None; if it refuses ignore_eos, add",
        ),
        (
            {"failing": lambda _: 400, "code": None},
            ("--api-key", "sk-wrong"),
            1,
            "400: Refused for Bearer ***",
        ),
        ({}, ("--concurrency", "2", "--request-rate", "5"), 2, "exclude each other"),
        ({}, ("--concurrency", "2000"), 2, "--concurrency is '2000': it can be 1 to 1,024"),
        ({}, ("--ttft-p95", "500"), 2, "--ttft-p95 is '500': it has no unit"),
        ({}, ("--request-rate", "20k/s"), 2, "--request-rate is '20k/s': "),
        (
            {},
            ("--request-rate", "20000"),
            2,
            "--request-rate is '20000': it can be at most 10,000",
        ),
        ({}, ("--concurrency", "max"), 2, "--concurrency is 'max', not a number"),
        ({}, ("--request-rate", "0.001", "--duration", "10ms"), 2, "no request was due"),
    ],
)
def test_a_refusal_names_the_cause_and_the_way_out(slipway, serves, arguments, code, words):
    with serving(**serves) as endpoint:
        done = slipway("bench", endpoint.url, *SMALL, *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert "sk-wrong" not in done.err


def test_an_endpoint_that_does_not_answer_or_is_no_address_is_named(slipway):
    with serving() as endpoint:
        url = endpoint.url
    done = slipway("bench", url)
    assert (done.code, f"{url}/v1 does not answer" in done.err) == (1, True)
    done = slipway("bench", "ftp://x")
    assert (done.code, "http://localhost:8000/v1" in done.err) == (2, True)


def test_the_key_of_the_environment_is_sent_and_its_own_variable_goes_first(slipway, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("SLIPWAY_BENCH_KEY", "sk-own")
    with serving(key="sk-own") as endpoint:
        done = slipway("bench", endpoint.url, *SMALL, "--num-requests", "1", "-o", "json")
    assert report_of(done)["completed"] == 1
    assert "sk-" not in slipway("bench", "--help").out + done.out


def test_ctrl_c_prints_what_was_measured_so_far(slipway):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background

    def interrupt(number):
        if number == 6 + WARM_UP:
            os.kill(os.getpid(), signal.SIGINT)

    with serving(answered=interrupt) as endpoint:
        done = slipway("bench", endpoint.url, *SMALL, "--concurrency", "2", "--duration", "60s",
                       "-o", "json")  # fmt: skip
    report = json.loads(done.out)
    assert done.code == 130
    assert report["is_interrupted"]
    assert 3 <= report["completed"] <= 8
    assert report["ttft_seconds"]["p50"] >= 0.05
