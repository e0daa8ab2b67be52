#!/usr/bin/env python3
"""Hold a training run against a plan: read its log, compare the step time with the prediction.

Reads the logs of torchtitan, Megatron-LM, DeepSpeed, the Hugging Face trainer and any that has
``step_seconds``; the first steps compile and warm up, and are left out.
"""

import argparse
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from planner.exports.probes.report import report

# What the plan predicts; the export puts it here.
CLAIM: dict[str, Any] = {}
NUMBER = r"([0-9][0-9,]*\.?[0-9]*(?:e[-+]?[0-9]+)?)"
# How each log writes its speed, and what turns that into seconds a step.
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
    """Return the step times that a log tells, in the first way of writing them that it uses."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for name, pattern in PATTERNS.items():
        found = [float(value.replace(",", "")) for value in re.findall(pattern, plain)]
        if found:
            return [step_seconds(name, value, load) for value in found]
    return []


def measured(steps: list[float], load: dict[str, Any], warm_up: int) -> dict[str, float]:
    """Return the median step, and the tokens per second that follow from it."""
    seconds = statistics.median(steps[warm_up:] or steps)
    tokens = load["global_batch_size"] * load["sequence_length"]
    return {"step_seconds": seconds, "tokens_per_second": tokens / seconds}


def main() -> int:
    """Read a log and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="what the training run printed")
    parser.add_argument("--warm-up", type=int, default=3, help="steps to leave out")
    chosen = parser.parse_args()
    steps = read(chosen.log.read_text(errors="replace"), CLAIM["load"])
    if not steps:
        print(f"{chosen.log} tells no step time in any form that this script knows")
        return 2
    print(f"{CLAIM['title']}: {len(steps)} logged steps", flush=True)
    return report(CLAIM, measured(steps, CLAIM["load"], chosen.warm_up))


if __name__ == "__main__":
    sys.exit(main())
