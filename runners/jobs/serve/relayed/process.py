"""The engine's process: start, health, end, and its metrics."""

import os
import re
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx

from runners.jobs.bound import bound
from runners.jobs.model_files import template_text
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.contract import EngineProcessError
from runners.jobs.serve.figures import Buckets, EndpointMetrics, ScrapedMetrics
from runners.jobs.serve.process import OwnProcess
from runners.jobspec.serve import LOOPBACK
from runners.shared.engine_commands import DTYPES
from runners.shared.timing import ENGINE_START_SECONDS

# ---------------------------------------------------------------------------
# Starts an HTTP engine on a loopback port with its flags, and waits until it is healthy.
# ---------------------------------------------------------------------------


POLL_SECONDS = 0.1
ASK_SECONDS = 10.0
PORT_TRIES = 50
TRIES = 3  # with new ports: another process may take a port before the engine binds it
HEALTH, METRICS, MODELS = "/health", "/metrics", "/v1/models"
MAX_CAUSE = 400  # characters
CAUSE_SECONDS = 20.0  # before an exit: an earlier error, such as a request's, is not its cause
_TAKEN = "address already in use"
# Error lines of Python and argparse, after any logger prefix.
_CAUSE = re.compile(r"(?:^|[\s:)\]])((?:[A-Za-z_.]*(?:Error|Exception)|error): .+)")
_DIED = re.compile(r"\] (.+ died unexpectedly.*)")  # vllm/v1/executor/multiproc_executor.py
_NO_ERROR = re.compile(r" (?:DEBUG|INFO|WARNING) ")


class Command(NamedTuple):
    """The start command of an engine: its argv, and additional environment variables."""

    argv: Sequence[str]
    env: Mapping[str, str]


class ListenAddress(NamedTuple):
    """The port an engine listens on, and the API key it requires."""

    port: int
    key: str


class ServerProcess(OwnProcess):
    """One life of an HTTP engine; only this process has its key."""

    def __init__(self, title: str, command: Command, listen: ListenAddress) -> None:
        self.key = listen.key
        self.address = f"http://{LOOPBACK}:{listen.port}"
        self.argv = tuple(command.argv)
        self._died = self._error = ""
        self._error_at = 0.0
        super().__init__(title, bound(command.argv), {**os.environ, **command.env})
        self.stdin.close()
        self._started_at = time.monotonic()

    def take(self, line: str) -> None:
        """Keep a line, and the error that it tells of; that a process died explains the others."""
        super().take(line)
        if died := _DIED.search(line):
            self._died = self._died or died[1].strip()
        elif not _NO_ERROR.search(line) and (cause := _CAUSE.search(line)):
            self._error, self._error_at = cause[1].strip(), time.monotonic()

    def how(self) -> str:
        """Return how the process just exited: in order, if its engine has failed before."""
        is_recent = time.monotonic() - self._error_at <= CAUSE_SECONDS
        told = (self._died or (self._error if is_recent else ""))[:MAX_CAUSE].rstrip(".")
        return f"ended: {told}" if told and (self.code or 0) >= 0 else super().how()

    @property
    def headers(self) -> dict[str, str]:
        """Return the request headers with the key."""
        return {"Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> httpx.Response | None:
        """Return the response to a GET, or None if the request fails."""
        with suppress(httpx.HTTPError):
            address, headers = f"{self.address}{path}", self.headers
            return httpx.get(address, headers=headers, timeout=ASK_SECONDS, trust_env=False)
        return None

    def is_healthy(self) -> bool:
        """Return whether the engine accepts requests.

        Raises:
            BadInputError: the engine rejects the model or an argument; the message is its own.
            EngineProcessError: the engine was killed, or was not healthy in time.
        """
        if not self.has_ended:
            response = self.get(HEALTH)
            if response is not None and response.is_success:
                return True
            if time.monotonic() - self._started_at > ENGINE_START_SECONDS:
                self.kill()
                msg = f"{self.title} did not become healthy within {ENGINE_START_SECONDS:g} s"
                raise EngineProcessError(msg)
            return False
        last_lines = self.last_output_lines()
        self.kill()  # processes it started may still run
        if (self.code or 0) < 0:
            raise EngineProcessError(f"{self.title} did not start: {self.how()}")
        raise BadInputError(f"{self.title} does not start with this model: {_cause(last_lines)}")

    @property
    def is_port_taken(self) -> bool:
        """Return whether the engine failed because its port was taken."""
        return any(_TAKEN in line.lower() for line in self.last)


def _cause(lines: Sequence[str]) -> str:
    """Return the line with the cause, without its logger prefix."""
    causes = [match[1] for line in lines if (match := _CAUSE.search(line))]
    return (causes[-1] if causes else " / ".join(lines[-3:]) or "no output")[:MAX_CAUSE]


Starting = Callable[[ListenAddress], Command]


class _Start:
    """A starting engine; it is restarted on another port if its port was taken."""

    def __init__(self, title: str, command: Starting) -> None:
        self._title = title
        self._command = command
        self._tries = 0
        self._is_up = False
        self.process = self._launch()

    def _launch(self) -> ServerProcess:
        self._tries += 1
        listen = ListenAddress(free_ports(1), secrets.token_urlsafe(24))
        return ServerProcess(self._title, self._command(listen), listen)

    def is_up(self) -> bool:
        """Return whether the engine accepts requests; see ``ServerProcess.is_healthy``."""
        try:
            self._is_up = self._is_up or self.process.is_healthy()
        except BadInputError:
            if self._tries == TRIES or not self.process.is_port_taken:
                raise
            self.process = self._launch()
        return self._is_up


def start_engine(title: str, command: Starting) -> ServerProcess:
    """Start an engine on a free port; return it when it is healthy.

    Raises:
        BadInputError: the engine rejects the model or an argument.
        EngineProcessError: the engine was killed, or was not healthy in time.
    """
    return start_engines([(title, command)])[0]


def start_engines(commands: Sequence[tuple[str, Starting]]) -> list[ServerProcess]:
    """Start several engines, by title and command; if one fails, kill all of them.

    All start in this thread: an engine is killed when the thread that started it ends.

    Raises:
        BadInputError: an engine rejects the model or an argument.
        EngineProcessError: an engine was killed, or was not healthy in time.
    """
    begun: list[_Start] = []
    try:
        begun += [_Start(title, command) for title, command in commands]
        while waiting := [each for each in begun if not each.is_up()]:
            waiting[0].process.wait(POLL_SECONDS)
    except BaseException:
        for each in begun:
            each.process.kill()
        raise
    return [each.process for each in begun]


def free_ports(count: int, apart_from: int = 0) -> int:
    """Return the first of ``count`` consecutive free ports, none of them ``apart_from``.

    Raises:
        EngineProcessError: no such ports were found.
    """
    for _ in range(PORT_TRIES):
        with ExitStack() as stack, suppress(OSError, OverflowError):
            first = _bound(stack, 0)
            for port in range(first + 1, first + count):
                _bound(stack, port)
            if not first <= apart_from < first + count:
                return first
    raise EngineProcessError(
        f"no {count} consecutive free ports found in {PORT_TRIES} tries; start the job again"
    )


def _bound(stack: ExitStack, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.bind((LOOPBACK, port))
    return int(listener.getsockname()[1])


# Start flags that follow from a model's files: quantization format and chat template.


# Plain lines, as Slipway's own engine formats a conversation without a chat template.
PLAIN_LINES = str(Path(__file__).with_name("plain_lines.jinja"))


def loaded_format(
    title: str,
    config: Mapping[str, object],
    weight_dtype: str,
    stored: Collection[str],
    loaded_as: Mapping[str, str],
) -> list[str]:
    """Return the flags that quantise plain weights at load; none for stored formats.

    Raises:
        BadInputError: the engine cannot read the stored format or quantise to this dtype.
    """
    if _stored_format(title, config, stored) is not None or weight_dtype in DTYPES:
        return []
    if weight_dtype not in loaded_as:
        msg = (
            f"weight_dtype is {weight_dtype}, and {title} makes no {_BITS[weight_dtype]}-bit "
            "weights of plain ones as it loads them; compress the model first, or choose "
            f"{' or '.join(loaded_as)}"
        )
        raise BadInputError(msg)
    return ["--quantization", loaded_as[weight_dtype]]


_BITS = {"int4": 4, "int8": 8, "fp8": 8}


def _stored_format(
    title: str, config: Mapping[str, object], stored: Collection[str]
) -> str | None:
    """Return the quantization method of stored weights, None for plain ones."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else "?"
    if method not in stored:
        msg = (
            f"config.json: quant_method is {method[:40]}, which {title} does not read; it reads "
            f"{', '.join(sorted(stored))}, or plain safetensors"
        )
        raise BadInputError(msg)
    return method


def template_flags(folder: Path) -> list[str]:
    """Return the chat template flag for a model without a template of its own."""
    return [] if template_text(folder) else ["--chat-template", PLAIN_LINES]


# ---------------------------------------------------------------------------
# Scrape an engine's Prometheus metrics into the endpoint's figures.
# ---------------------------------------------------------------------------


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_HEADS = ("# HELP ", "# TYPE ")
_BOUND = re.compile(r'\ble="([^"]+)"')
Samples = Mapping[str, float]


class MetricNames(NamedTuple):
    """An engine's names of the metrics in our charts; empty: the engine has no such metric."""

    running: str
    waiting: str
    kv_used: str  # 0 to 1
    prompt_tokens: str
    output_tokens: str
    ttft: str = ""  # a histogram in seconds
    tpot: str = ""  # likewise, one value per token

    @classmethod
    def with_prefix(cls, prefix: str, *names: str) -> "MetricNames":
        """Return the names, in this order, of an engine whose metrics share a prefix."""
        return cls(*(f"{prefix}:{name}" for name in names))


class Exposition:
    """One Prometheus page; the processes of a data-parallel engine are summed."""

    def __init__(self, text: str) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.most: dict[str, float] = defaultdict(float)
        self.buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for name, labels, value in _samples(text):
            self.sums[name] += value
            self.most[name] = max(self.most[name], value)
            if name.endswith("_bucket") and (bound := _BOUND.search(labels)):
                self.buckets[name.removesuffix("_bucket")][float(bound[1])] += value

    def histogram(self, name: str) -> Buckets | None:
        """Return a histogram with non-cumulative counts, or None if the page has none."""
        buckets = sorted(self.buckets[name].items())
        if not buckets:
            return None
        cumulative = [0, *(int(count) for _, count in buckets)]
        counts = tuple(later - earlier for earlier, later in pairwise(cumulative))
        return Buckets(tuple(bound for bound, _ in buckets[:-1]), counts, self.sums[f"{name}_sum"])


class TokenCounts(NamedTuple):
    """Counted tokens of prompts and of answers."""

    prompt: int = 0
    output: int = 0


NO_TOKENS = TokenCounts()


class Scraper:
    """Adds the counts of one engine life to an endpoint's figures.

    ``before`` is a page from before the first request; its counts are not added.
    """

    def __init__(self, names: MetricNames, figures: EndpointMetrics, before: str = "") -> None:
        self._names = names
        self._figures = figures
        self._last = last = Exposition(before)
        self._totals = TokenCounts(
            int(last.sums[names.prompt_tokens]), int(last.sums[names.output_tokens])
        )

    def add_page(self, text: str, seconds: float, repeated: TokenCounts = NO_TOKENS) -> bool:
        """Add a page, ``seconds`` after the previous one; return whether there are new tokens.

        ``repeated`` holds the tokens that the engines counted twice since they started.
        """
        now, last, names = Exposition(text), self._last, self._names
        prompt, output = self._new_tokens(now, repeated)
        self._last = now
        gauges = {
            "running_requests": now.sums[names.running],
            "waiting_requests": now.sums[names.waiting],
            "kv_cache_used_ratio": now.most[names.kv_used],
        }
        self._figures.step(seconds if output else 0.0, output, gauges)
        ttft, tpot = (_since(now, last, name) for name in (names.ttft, names.tpot))
        self._figures.absorb(ScrapedMetrics(prompt, ttft, tpot, text))
        return bool(prompt or output)

    def _new_tokens(self, now: Exposition, repeated: TokenCounts) -> TokenCounts:
        """Return the tokens since the last page; totals never decrease."""
        names, previous = self._names, self._totals
        self._totals = TokenCounts(
            max(previous.prompt, int(now.sums[names.prompt_tokens]) - repeated.prompt),
            max(previous.output, int(now.sums[names.output_tokens]) - repeated.output),
        )
        return TokenCounts(
            self._totals.prompt - previous.prompt, self._totals.output - previous.output
        )


def merged_metrics(pages: Mapping[str, str]) -> str:
    """Return the pages of several engines as one, with an engine label on each sample.

    The samples of one metric are adjacent, as the format requires.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for engine, text in pages.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(_HEADS):
                family = line.split(" ")[2]
                if line not in families[family]:
                    families[family].append(line)
            elif match := _SAMPLE.match(line):
                name, labels, value = match[1], match[2], match[3]
                family = family if family and name.startswith(family) else name
                labelled = f'slipway_engine="{engine}"' + (f",{labels}" if labels else "")
                families[family].append(f"{name}{{{labelled}}} {value}")
    return "\n".join(line for lines in families.values() for line in lines)


def _since(now: Exposition, last: Exposition, name: str) -> Buckets | None:
    current, previous = now.histogram(name), last.histogram(name)
    if current is None or previous is None or previous.bounds != current.bounds:
        return current
    counts = tuple(new - old for new, old in zip(current.counts, previous.counts, strict=True))
    return Buckets(current.bounds, counts, current.total - previous.total)


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.match(line)):
            yield match[1], match[2] or "", float(match[3])
