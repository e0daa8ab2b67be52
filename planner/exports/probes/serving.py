#!/usr/bin/env python3
"""Compare a running server with a plan: send the planned load and print both sets of figures.

The server must offer OpenAI's completions API. Prompts are random token ids, so that their length
is exact and only the planned prefix is cached; every answer is generated to its full length.
"""

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from planner.exports.probes.report import report

# The plan's prediction, inserted by the export.
CLAIM: dict[str, Any] = {}
WARM_UP = 2
DONE = b"[DONE]"


@dataclass(frozen=True)
class Sample:
    """One request: send time, times of the first and last token, and number of tokens."""

    sent: float
    first: float
    last: float
    tokens: int


def send(url: str, model: str, prompt: list[int], output_tokens: int) -> Sample:
    """Send one request and read its stream to the end."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(  # noqa: S310 - the address is the caller's own
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    sent = time.perf_counter()
    first = last = sent
    chunks = counted = 0
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - as above
        for line in answer:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == DONE:
                continue
            event = json.loads(data)
            if event.get("choices"):
                last = time.perf_counter()
                first = last if chunks == 0 else first
                chunks += 1
            counted = (event.get("usage") or {}).get("completion_tokens") or counted
    return Sample(sent, first, last, counted or chunks)


def words(draw: random.Random, load: dict[str, Any], count: int) -> list[int]:
    """Return ``count`` random token ids."""
    return [draw.randrange(1, load["vocab_size"]) for _ in range(count)]


def lengths(draw: random.Random, mean: int, variation: float, count: int) -> list[int]:
    """Return lengths with a mean and a standard deviation over it.

    They are uniform up to a variation of 1/sqrt(3), beyond it gamma distributed.
    """
    if variation <= 3**-0.5:
        drawn = [1 + 3**0.5 * variation * draw.uniform(-1, 1) for _ in range(count)]
    else:
        drawn = [draw.gammavariate(variation**-2, variation**2) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [max(1, round(scale * each)) for each in drawn]


def run(url: str, model: str, claim: dict[str, Any], num_requests: int) -> dict[str, float]:
    """Send the load of a claim and return the measured figures, by the claim's names."""
    load, samples, lock = claim["load"], [], threading.Lock()
    draw = random.Random(0)  # noqa: S311 - not for secrets
    shared = int(load["input_tokens"] * load.get("prefix_share_ratio", 0.0))
    prefix = words(draw, load, shared)
    variation = load.get("length_variation", 0.0)
    own = lengths(draw, load["input_tokens"] - shared, variation, num_requests)
    answers = lengths(draw, load["output_tokens"], variation, num_requests)
    most = load.get("max_request_tokens")  # the server refuses longer requests
    if most:
        answers = [min(count, most // 2) for count in answers]
        room = [most - shared - count for count in answers]
        own = [max(1, min(pair)) for pair in zip(own, room, strict=True)]
    prompts = [prefix + words(draw, load, count) for count in own]
    gate = threading.Semaphore(load.get("concurrency") or num_requests)

    def one(prompt: list[int], answer: int) -> None:
        with gate:
            sample = send(url, model, prompt, answer)
        with lock:
            samples.append(sample)

    started = time.perf_counter()
    pairs = zip(prompts, answers, strict=True)
    threads = [threading.Thread(target=one, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
        if load.get("request_rate_per_second"):
            time.sleep(draw.expovariate(load["request_rate_per_second"]))
    for thread in threads:
        thread.join()
    if len(samples) < num_requests:
        missing = num_requests - len(samples)
        raise SystemExit(f"{missing} of {num_requests} requests failed: nothing was measured")
    return figures(samples, time.perf_counter() - started)


def figures(samples: list[Sample], seconds: float) -> dict[str, float]:
    """Return the mean times of all requests, and the rates over the whole run."""
    count, tokens = len(samples), sum(sample.tokens for sample in samples)
    gaps = sum(sample.last - sample.first for sample in samples)
    return {
        "ttft_seconds": sum(sample.first - sample.sent for sample in samples) / count,
        "tpot_seconds": gaps / max(1, tokens - count),
        "latency_seconds": sum(sample.last - sample.sent for sample in samples) / count,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": count / seconds,
    }


def main() -> int:
    """Measure a running server, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://localhost:8000")
    parser.add_argument("--model", default=CLAIM.get("model"))
    parser.add_argument("--requests", type=int, default=CLAIM.get("requests", 1))
    chosen = parser.parse_args()
    load = {**CLAIM["load"], "output_tokens": WARM_UP}
    run(chosen.base_url, chosen.model, {**CLAIM, "load": load}, WARM_UP)
    print(f"{CLAIM['title']}: {chosen.requests} requests", flush=True)
    return report(CLAIM, run(chosen.base_url, chosen.model, CLAIM, chosen.requests))


if __name__ == "__main__":
    sys.exit(main())
