"""The measuring script of an export: a probe that contains the prediction."""

import json
from importlib.resources import files

from planner.exports.case import ExportCase
from planner.exports.claims import claims_of
from planner.specs.base import JsonObject
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload

PROBES = {"serve": "serving.py", "generate": "serving.py", "train": "training.py"}
IMPORT = "from planner.exports.probes.report import report\n"
EMPTY_CLAIM = "CLAIM: dict[str, Any] = {}"
# Rounds of a closed loop: enough that ramp-up and ramp-down have little weight.
ROUNDS = 4


def measure_text(case: ExportCase) -> str:
    """Return the script, empty for work that only the product's runner measures."""
    probe = PROBES.get(case.workload.kind)
    if probe is None:
        return ""
    report = _source("report.py").split("from typing import Any\n")[1].strip("\n")
    text = _source(probe).replace(IMPORT, f"\n{report}\n\n")
    claim = json.dumps(claim_of(case), indent=1, ensure_ascii=False)
    return text.replace(
        EMPTY_CLAIM, f"CLAIM: dict[str, Any] = json.loads(r'''{claim}''')"
    ).replace(
        "import re\n", "import json\nimport re\n" if probe == "training.py" else "import re\n"
    )


def _source(name: str) -> str:
    return files("planner.exports").joinpath("probes", name).read_text("utf-8")


def claim_of(case: ExportCase) -> JsonObject:
    """Return the script's input: the figures with their bounds, and the load to send."""
    load, requests = _load(case)
    return {
        "title": f"{case.model} on {case.hardware}",
        "model": case.model,
        "figures": claims_of(case.plan, case.workload.kind),
        "load": load,
        "requests": requests,
    }


def _load(case: ExportCase) -> tuple[JsonObject, int]:
    workload = case.workload
    if isinstance(workload, TrainWorkload):
        batch = {"global_batch_size": workload.global_batch_size}
        return {
            **batch,
            "sequence_length": workload.sequence_length,
            "devices": case.devices,
        }, 0
    if not isinstance(workload, ServeWorkload | GenerateWorkload):
        return {}, 0
    lengths = {"input_tokens": workload.input_tokens, "output_tokens": workload.output_tokens}
    load: JsonObject = {**lengths, "vocab_size": case.shape.vocab_size}
    if isinstance(workload, GenerateWorkload):
        return {**load, "concurrency": workload.batch_size}, workload.batch_size
    load["prefix_share_ratio"] = workload.prefix_share_ratio
    if workload.request_rate_per_second:
        rate = workload.request_rate_per_second
        return {**load, "request_rate_per_second": rate}, max(100, int(60 * rate))
    concurrency = workload.concurrency or case.plan.performance.max_concurrency or 1
    return {**load, "concurrency": concurrency}, ROUNDS * concurrency
