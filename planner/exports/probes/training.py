#!/usr/bin/env python3
"""Compare a training run with a plan: read its log and compare the step time.

Reads the logs of torchtitan, Megatron-LM, DeepSpeed, the Hugging Face trainer and any log with
``step_seconds``. The first steps compile and warm up, and are left out.
"""

import argparse
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from planner.exports.probes.report import report

# The plan's prediction, inserted by the export.
CLAIM: dict[str, Any] = {}
NUMBER = r"([0-9][0-9,]*\.?[0-9]*(?:e[-+]?[0-9]+)?)"
# Pattern of the speed in each log, by unit.
PATTERNS = {
    "step_seconds": rf"step_seconds[\"']?\s*[:=]\s*{NUMBER}",
    "step_milliseconds": rf"elapsed time per iteration \(ms\):\s*{NUMBER}",
    "tokens_per_second_per_device": rf"\btps:\s*{NUMBER}",
    "samples_per_second": rf"\b(?:CurrSamplesPerSec|train_samples_per_second)\W*[:=]\s*{NUMBER}",
    "seconds_per_iteration": rf"{NUMBER}s/it\b",
    "iterations_per_second": rf"{NUMBER}it/s\b",
}


def step_seconds(name: str, value: float, load: dict[str, Any]) -> float:
    """Return a logged speed as seconds of one step of the whole batch."""
    samples = load["global_batch_size"]
    tokens = samples * load["sequence_length"]
    return {
        "step_seconds": value,
        "step_milliseconds": value / 1000,
        "tokens_per_second_per_device": tokens / (value * load["devices"]) if value else 0.0,
        "samples_per_second": samples / value if value else 0.0,
        "seconds_per_iteration": value,
        "iterations_per_second": 1 / value if value else 0.0,
    }[name]


def read(text: str, load: dict[str, Any]) -> list[float]:
    """Return the step times in a log, from the first matching pattern."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for name, pattern in PATTERNS.items():
        values = [float(value.replace(",", "")) for value in re.findall(pattern, plain)]
        if values:
            return [step_seconds(name, value, load) for value in values]
    return []


def median_figures(steps: list[float], load: dict[str, Any], warm_up: int) -> dict[str, float]:
    """Return the median step time, and its tokens per second."""
    seconds = statistics.median(steps[warm_up:] or steps)
    tokens = load["global_batch_size"] * load["sequence_length"]
    return {"step_seconds": seconds, "tokens_per_second": tokens / seconds}


def main() -> int:
    """Read a log and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="what the training run printed")
    parser.add_argument("--warm-up", type=int, default=3, help="steps to leave out")
    chosen = parser.parse_args()
    steps = read(chosen.log.read_text(errors="replace"), CLAIM["load"])
    if not steps:
        print(f"{chosen.log} prints no step time in a known format")
        return 2
    print(f"{CLAIM['title']}: {len(steps)} logged steps", flush=True)
    return report(CLAIM, median_figures(steps, CLAIM["load"], chosen.warm_up))


if __name__ == "__main__":
    sys.exit(main())
