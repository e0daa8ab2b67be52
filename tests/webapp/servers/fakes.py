"""Servers that pretend to be an engine: its addresses, its figures, and bad manners on request."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Respond = Callable[[BaseHTTPRequestHandler], None]


class Figures:
    """The figures of vLLM or SGLang, published by the client library that both use.

    Names, labels and bounds are those of their sources (``webapp.servers.engines``).
    """

    VLLM = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv": "vllm:kv_cache_usage_perc",
        "prompt": "vllm:prompt_tokens",
        "output": "vllm:generation_tokens",
        "preempted": "vllm:num_preemptions",
        "asked": "vllm:prefix_cache_queries",
        "found": "vllm:prefix_cache_hits",
        "ttft": "vllm:time_to_first_token_seconds",
        "tpot": "vllm:inter_token_latency_seconds",
        "latency": "vllm:e2e_request_latency_seconds",
    }
    SGLANG = {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv": "sglang:token_usage",
        "prompt": "sglang:prompt_tokens_total",
        "output": "sglang:generation_tokens_total",
        "preempted": "sglang:num_retracted_requests_total",
        "found": "sglang:cached_tokens_total",
        "ttft": "sglang:time_to_first_token_seconds",
        "tpot": "sglang:inter_token_latency_seconds",
        "latency": "sglang:e2e_request_latency_seconds",
    }
    GAUGES, HISTOGRAMS = ("running", "waiting", "kv"), ("ttft", "tpot", "latency")
    BOUNDS = (0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0, 2.0, 4.0, 10.0)

    def __init__(self, names: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": "acme/tiny", "engine": "0"}
        self.of: dict[str, Any] = {}
        for key, name in names.items():
            kind: Any = Gauge if key in self.GAUGES else Counter
            more: dict[str, Any] = {}
            if key in self.HISTOGRAMS:
                kind, more = Histogram, {"buckets": self.BOUNDS}
            made = kind(name, f"Of {key}.", list(labels), registry=self.registry, **more)
            self.of[key] = made.labels(**labels)

    def serve(self, requests: int, *, running: int = 2, ttft: float = 0.15) -> None:
        """Count requests of 100 prompt tokens, half of them cached, and 11 answer tokens."""
        self.of["running"].set(running)
        self.of["waiting"].set(1)
        self.of["kv"].set(0.25)
        for _ in range(requests):
            self.of["prompt"].inc(100)
            self.of["output"].inc(11)
            self.of["found"].inc(50)
            if "asked" in self.of:
                self.of["asked"].inc(100)
            self.of["ttft"].observe(ttft)
            self.of["latency"].observe(ttft + 0.3)
            for _ in range(10):
                self.of["tpot"].observe(0.03)

    def text(self) -> str:
        """Return the page."""
        return generate_latest(self.registry).decode()


def llamacpp(requests: int) -> str:
    """Return the page of llama.cpp's server after so many requests, as its README lists it."""
    rows = {
        "prompt_tokens_total": ("counter", 100 * requests),
        "prompt_seconds_total": ("counter", 0.1 * requests),
        "tokens_predicted_total": ("counter", 11 * requests),
        "tokens_predicted_seconds_total": ("counter", 0.33 * requests),
        "requests_processing": ("gauge", 2),
        "requests_deferred": ("gauge", 1),
    }
    return "".join(
        f"# HELP llamacpp:{name} Of it.\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
        for name, (kind, value) in rows.items()
    )


def tgi(requests: int) -> str:
    """Return the page of TGI after so many requests, as its metrics.md lists it."""
    lines = ["# TYPE tgi_queue_size gauge", "tgi_queue_size 1", "# TYPE tgi_batch_current_size gauge",
             "tgi_batch_current_size 2"]  # fmt: skip
    sums = {
        "tgi_request_input_length": ("50", 100),
        "tgi_request_generated_tokens": ("8", 11),
        "tgi_request_mean_time_per_token_duration": ("0.02", 0.03),
        "tgi_request_duration": ("0.4", 0.45),
    }
    for name, (bound, each) in sums.items():
        lines += [f"# TYPE {name} histogram", f'{name}_bucket{{le="{bound}"}} 0',
                  f'{name}_bucket{{le="{float(bound) * 2}"}} {requests}',
                  f'{name}_bucket{{le="+Inf"}} {requests}', f"{name}_sum {each * requests}",
                  f"{name}_count {requests}"]  # fmt: skip
    return "\n".join(lines) + "\n"


class Fake:
    """What a pretended server answers by path; ``seen`` holds (path, Authorization)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, str | Respond] = {}
        self.seen: list[tuple[str, str]] = []

    def be(self, engine: str, text: str | None, **fields: Any) -> None:
        """Answer as an engine does that serves one model."""
        model = {"id": "tiny", "object": "model", "root": "acme/tiny", "max_model_len": 2048}
        owner = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}.get(engine, "")
        model |= {"owned_by": owner} | fields
        self.answers = {"/v1/models": json.dumps({"object": "list", "data": [model]})}
        if text is not None:
            self.answers["/metrics"] = text
        release = {
            "vllm": ("/version", {"version": "0.33.0"}),
            "sglang": ("/get_server_info", {"version": "0.5.23", "api_key": "not to be kept"}),
            "llamacpp": ("/props", {"build_info": "b9000-abc",
                                    "total_slots": 4,
                                    "default_generation_settings": {"n_ctx": 1024}}),
            "tgi": ("/info", {"version": "3.3.6", "max_total_tokens": 4096}),
            "ollama": ("/api/version", {"version": "0.12.6"}),
        }.get(engine)  # fmt: skip
        if release:
            self.answers[release[0]] = json.dumps(release[1])


@contextmanager
def fake_server() -> Iterator[Fake]:
    """Serve a pretended server on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.seen.append((self.path, self.headers.get("Authorization", "")))
            answer = fake.answers.get(self.path)
            if callable(answer):
                answer(self)
                return
            body = (answer or "{}").encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    fake = Fake(f"http://127.0.0.1:{httpd.server_port}")
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Answer with more bytes than anybody reads, as fast as they are taken."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(1024):  # a gibibyte
            handler.wfile.write(b"#" * 2**20)
    except OSError:
        return


def slow(handler: BaseHTTPRequestHandler) -> None:
    """Answer with a byte now and then, without an end."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b"#")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        return


def redirect_to(place: str) -> Respond:
    """Return a handler that redirects."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", place)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer
