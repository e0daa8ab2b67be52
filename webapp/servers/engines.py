"""Names under which engines publish their figures, and one reading of them.

Sources, each opened for what stands here:

- vLLM: ``vllm/v1/metrics/loggers.py`` of 0.33.0 and of 005a810 (2025), whose
  ``gpu_cache_usage_perc``, ``gpu_prefix_cache_*`` and ``time_per_output_token_seconds`` are the
  older names; counters get ``_total`` from its Prometheus client. ``GET /version``.
- SGLang: ``python/sglang/srt/observability/metrics_collector.py`` of 016d8605, older names in
  ``docs/references/production_metrics.md`` of 00b08c49. It counts a request's tokens when the
  request ends. ``GET /get_server_info`` in ``srt/entrypoints/http_server.py``.
- llama.cpp: ``tools/server/README.md`` of 00dc8057, sections of ``GET /metrics`` and ``GET
  /props`` (``n_ctx`` is of one slot; ``total_slots``), and the server's source for
  ``kv_cache_usage_ratio``, which later releases have no more. It has no histograms: the seconds
  and tokens of its decoding give a mean.
- TGI: ``docs/source/reference/metrics.md`` of 53fdbe61 and ``Info`` in ``docs/openapi.json`` of
  003eaec0. Its time per token is the mean of a request, and it has no time to first token.
- Ollama: ``GET /api/version`` (docs.ollama.com); it publishes no figures.
- Slipway's own endpoints: ``runners/jobs/serve/figures.py``.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

Names = tuple[str, ...]  # alternatives, the first one that a server has is taken


class Engine(NamedTuple):
    """An engine: how it is recognised, where it says its release, the names of its figures."""

    name: str
    title: str
    prefix: str = ""  # of its metrics
    owned_by: str = ""  # of its models in /v1/models
    release_path: str = ""
    release_field: str = "version"
    told_by: str = ""  # a field of that answer by which a server without figures is recognised
    context_field: tuple[str, ...] = ()  # there, if /v1/models does not say the longest request
    command: str = "vllm serve {model}"  # as the wizard reads it
    length_option: str = "--max-model-len"
    slots_option: str = ""  # where the length is that of all slots together
    slots_field: str = ""  # number of slots, in the answer of release_path
    planned_as: str = ""  # the engine of ``command``, where the planner does not know this one
    switch: str = ""  # option of its command line without which it has no /metrics
    running: Names = ()
    waiting: Names = ()
    kv_used: Names = ()  # 0 to 1
    prompt_tokens: Names = ()
    output_tokens: Names = ()
    preemptions: Names = ()
    prefix_asked: Names = ()  # prompt tokens that were looked up in the prefix cache
    prefix_found: Names = ()
    requests: Names = ()  # that ended
    ttft: Names = ()  # histograms in seconds
    tpot: Names = ()
    latency: Names = ()
    decode_seconds: Names = ()  # in all, of an engine without a histogram of tpot


ENGINES = (  # one of Slipway shows the names of its engine too, behind its own
    Engine(
        "slipway",
        "Slipway",
        prefix="slipway_",
        running=("slipway_running_requests",),
        waiting=("slipway_waiting_requests",),
        kv_used=("slipway_kv_cache_used_ratio",),
        prompt_tokens=("slipway_prompt_tokens_total",),
        output_tokens=("slipway_output_tokens_total",),
        requests=("slipway_ttft_seconds_count",),
        ttft=("slipway_ttft_seconds",),
        tpot=("slipway_tpot_seconds",),
    ),
    Engine(
        "vllm",
        "vLLM",
        prefix="vllm:",
        owned_by="vllm",
        release_path="/version",
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        prompt_tokens=("vllm:prompt_tokens_total",),
        output_tokens=("vllm:generation_tokens_total",),
        preemptions=("vllm:num_preemptions_total",),
        prefix_asked=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        prefix_found=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        requests=("vllm:e2e_request_latency_seconds_count",),
        ttft=("vllm:time_to_first_token_seconds",),
        tpot=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        latency=("vllm:e2e_request_latency_seconds",),
    ),
    Engine(
        "sglang",
        "SGLang",
        prefix="sglang:",
        owned_by="sglang",
        release_path="/get_server_info",
        command="python -m sglang.launch_server --model-path {model}",
        length_option="--context-length",
        switch="--enable-metrics",
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_used=("sglang:token_usage",),
        prompt_tokens=("sglang:prompt_tokens_total",),
        output_tokens=("sglang:generation_tokens_total",),
        preemptions=("sglang:num_retracted_requests_total",),
        prefix_asked=("sglang:prompt_tokens_total",),
        prefix_found=("sglang:cached_tokens_total",),
        requests=("sglang:e2e_request_latency_seconds_count",),
        ttft=("sglang:time_to_first_token_seconds",),
        tpot=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        latency=("sglang:e2e_request_latency_seconds",),
    ),
    Engine(
        "llamacpp",
        "llama.cpp",
        prefix="llamacpp:",
        owned_by="llamacpp",
        release_path="/props",
        release_field="build_info",
        told_by="build_info",
        context_field=("default_generation_settings", "n_ctx"),
        command="llama-server -m {model}",
        length_option="-c",
        slots_option="-np",
        slots_field="total_slots",
        switch="--metrics",
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        kv_used=("llamacpp:kv_cache_usage_ratio",),
        prompt_tokens=("llamacpp:prompt_tokens_total",),
        output_tokens=("llamacpp:tokens_predicted_total",),
        decode_seconds=("llamacpp:tokens_predicted_seconds_total",),
    ),
    Engine(
        "tgi",
        "TGI",
        prefix="tgi_",
        release_path="/info",
        told_by="max_total_tokens",
        context_field=("max_total_tokens",),
        planned_as="vLLM",
        running=("tgi_batch_current_size",),
        waiting=("tgi_queue_size",),
        prompt_tokens=("tgi_request_input_length_sum",),
        output_tokens=("tgi_request_generated_tokens_sum",),
        requests=("tgi_request_duration_count",),
        tpot=("tgi_request_mean_time_per_token_duration",),
        latency=("tgi_request_duration",),
    ),
    Engine(
        "ollama",
        "Ollama",
        release_path="/api/version",
        told_by="version",
        command="ollama run {model}",
        length_option="",
    ),
)
BY_NAME: Mapping[str, Engine] = {each.name: each for each in ENGINES}
GAUGES = ("running", "waiting", "kv_used")
COUNTERS = (
    "prompt_tokens",
    "output_tokens",
    "preemptions",
    "prefix_asked",
    "prefix_found",
    "requests",
    "decode_seconds",
)
HISTOGRAMS = ("ttft", "tpot", "latency")
# Bounds of what is parsed: the parser's time grows with the square of a line.
MOST_LINES = 65_536
MOST_LINE = 1024  # characters of a sample
MOST_LABELS = 16
MOST_SAMPLES = 512 * 1024  # characters of all that are read: those of some fifty replicas
MOST_BUCKETS = 256  # of a histogram; engines publish some 30
LARGEST = 1e18  # beyond it, a value is no count, ratio or time of an engine
_SAMPLE = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)[\s{]")


def _known_names() -> frozenset[str]:
    """Return every name of a sample that is read."""
    found = set()
    for engine in ENGINES:
        for kind in (*GAUGES, *COUNTERS):
            found |= set(getattr(engine, kind))
        for kind in HISTOGRAMS:
            found |= {f"{name}_{part}" for name in getattr(engine, kind) for part in _PARTS}
    return frozenset(found)


_PARTS = ("bucket", "sum", "count")
KNOWN_NAMES = _known_names()


class Histogram(NamedTuple):
    """A Prometheus histogram: cumulative counts by the upper bound of their bucket, and the sum.

    The last bound is infinite: its count is that of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def num_values(self) -> float:
        """Return the number of values."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: "Histogram | None") -> "Histogram | None":
        """Return the values that came after ``before``; None if it counts otherwise, or more."""
        if before is None or before.bounds != self.bounds:
            return None
        counts = tuple(new - old for new, old in zip(self.counts, before.counts, strict=True))
        if any(each < 0 for each in counts) or self.total < before.total:
            return None
        return Histogram(self.bounds, counts, self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """Return the value that ``share`` (0 to 1) of the values do not exceed; None of none.

        As ``histogram_quantile`` of Prometheus: linear within a bucket, the first of which begins
        at 0; beyond the last finite bound it is that bound, which the true value exceeds.
        """
        if not self.num_values:
            return None
        rank, below, low = share * self.num_values, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return (
                    low
                    if math.isinf(bound)
                    else low + (bound - low) * (rank - below) / (count - below)
                )
            below, low = count, low if math.isinf(bound) else bound
        return low


@dataclass(frozen=True)
class Reading:
    """The figures of one engine at one instant, by the fields of :class:`Engine`."""

    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    def is_after_restart(self, before: "Reading") -> bool:
        """Return whether the server began to count anew since ``before``."""
        if any(self.counters.get(name, 0.0) < old for name, old in before.counters.items()):
            return True
        return any(
            self.histograms[name].since(old) is None
            for name, old in before.histograms.items()
            if name in self.histograms
        )

    @property
    def in_flight(self) -> float | None:
        """Return the requests that run or wait; None if the server does not say."""
        if "running" not in self.gauges:
            return None
        return self.gauges["running"] + self.gauges.get("waiting", 0.0)


def _known_lines(text: str) -> list[str]:
    """Return the samples of a page that are read, within the bounds of what is parsed.

    Raises:
        ValueError: the page is not in the text format of Prometheus, or beyond a bound.
    """
    lines = text.split("\n", MOST_LINES)
    if len(lines) > MOST_LINES:
        raise ValueError(f"more than {MOST_LINES:,} lines")
    found, num_characters = [], 0
    for line in lines:
        if not line.strip() or line.lstrip()[0] in "#{":  # {: a name in quotes, which none has
            continue
        named = _SAMPLE.match(line)
        if named is None:
            raise ValueError(f"a line begins with {line[:20]!r}, which is no name")
        if named[1] not in KNOWN_NAMES:
            continue
        if len(line) > MOST_LINE or line.count('"') > 2 * MOST_LABELS:
            raise ValueError(
                f"{named[1]} has a line of more than {MOST_LINE:,} characters or {MOST_LABELS} "
                "labels"
            )
        found.append(line)
        num_characters += len(line)
        if num_characters > MOST_SAMPLES:
            raise ValueError(f"more than {MOST_SAMPLES // 1024} KiB of samples of its engine")
    return found


class _Samples:
    """The samples of a page: those of one name are summed, as of several replicas of an engine.

    What is no finite value from 0 to ``LARGEST`` is left out.
    """

    def __init__(self, text: str) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.most: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        lines = "\n".join(_known_lines(text)) + "\n"
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                self._add(sample.name, sample.labels, float(sample.value))

    def _add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if not 0 <= value <= LARGEST:
            return
        self.sums[name] += value
        self.most[name] = max(self.most.get(name, value), value)
        if name.endswith("_bucket") and (le := labels.get("le")):
            bound = float(le)
            if abs(bound) <= LARGEST or bound == math.inf:
                self.buckets[name.removesuffix("_bucket")][bound] += value

    def first(self, names: Iterable[str]) -> str:
        """Return the first of some names that the page has, "" without one."""
        return next((each for each in names if each in self.sums), "")

    def histogram(self, names: Iterable[str]) -> Histogram | None:
        """Return the first of some histograms that the page has and that is one."""
        name = next((each for each in names if each in self.buckets), "")
        buckets = sorted(self.buckets[name].items()) if name else []
        if not 0 < len(buckets) <= MOST_BUCKETS or not math.isinf(buckets[-1][0]):
            return None
        counts = tuple(count for _, count in buckets)
        if any(later < earlier for earlier, later in pairwise(counts)):
            return None
        return Histogram(tuple(bound for bound, _ in buckets), counts, self.sums[f"{name}_sum"])


def read_metrics(text: str) -> tuple[Engine | None, Reading]:
    """Return whose Prometheus page a text is, and its figures; None: of no engine known here.

    The time that this takes is bounded, whatever the text: only samples of known names are parsed.

    Raises:
        ValueError: it is not in the text format of Prometheus, or beyond a bound.
    """
    samples = _Samples(text)
    present = samples.sums.keys()
    engine = next(
        (
            each
            for each in ENGINES
            if each.prefix and any(name.startswith(each.prefix) for name in present)
        ),
        None,
    )
    if engine is None:
        return None, Reading()
    gauges, counters, histograms = {}, {}, {}
    for name in GAUGES:
        if found := samples.first(getattr(engine, name)):
            gauges[name] = (samples.most if name == "kv_used" else samples.sums)[found]
    for name in COUNTERS:
        if found := samples.first(getattr(engine, name)):
            counters[name] = samples.sums[found]
    for name in HISTOGRAMS:
        if (histogram := samples.histogram(getattr(engine, name))) is not None:
            histograms[name] = histogram
    return engine, Reading(gauges, counters, histograms)
