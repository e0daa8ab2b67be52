"""What is launched is what is stored: the job of a plan, the command on a host, every export.

An entry of ``launches/specs.toml`` is a spec on a host; one of ``PLANS`` goes from a plan through
the web side to the host; one of ``EXPORTS`` is a plan in the format of another tool.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from planner.exports.registry import FORMATS, export
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.shared.messages import RunRequest
from tests.books.book import FOLDER, Book, json_differences, json_text, line_differences
from tests.books.host_side import HostSide
from tests.books.normalising import with_placeholders
from tests.planner.asking import LLAMA_70B, MIXTRAL
from tests.planner.exports.making import made, trained
from tests.webapp.conftest import claim, make_beat, make_facts
from tests.webapp.jobs.gangs import make_hosts, members
from webapp.agents.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import Job
from webapp.plans.models import Plan

BOOK = Book("launches", ".json", json_differences)
EXPORT_BOOK = Book("launches", ".txt", line_differences)
SPECS: dict[str, dict[str, Any]] = tomllib.loads(
    (FOLDER / "launches" / "specs.toml").read_text("utf-8")
)
KEY, KEY_HASHES = "key", ("a" * 64,)
GPU = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 80 * 1024**3}
PLANS: dict[str, dict[str, Any]] = {
    "plan-serve-measured": {"goal": "serve", "source": "catalog"},
    "plan-serve-slipway": {"goal": "serve", "source": "team", "engine": "slipway"},
    "plan-serve-llamacpp": {"goal": "serve", "source": "team", "engine": "llamacpp"},
    "plan-serve-vllm": {"goal": "serve", "source": "team", "engine": "vllm", "gpus": 2},
    "plan-serve-sglang": {
        "goal": "serve", "source": "folder", "engine": "sglang", "gpus": 2,
        "pins": {"tensor_parallel_size": 2},
    },
    "plan-serve-no-weights": {"goal": "serve", "source": "demo", "engine": "slipway"},
    "plan-generate": {"goal": "generate", "source": "folder", "pins": {"weight_dtype": "int8"}},
    "plan-generate-config": {"goal": "generate", "source": "config"},
    "plan-finetune": {"goal": "finetune", "source": "team"},
    "plan-finetune-no-weights": {"goal": "finetune", "source": "demo"},
    "plan-pretrain": {"goal": "pretrain", "source": "demo"},
    "plan-pretrain-two-hosts": {"goal": "pretrain", "source": "demo", "hosts": 2},
    "plan-pretrain-pipeline": {
        "goal": "pretrain", "source": "demo", "hosts": 2, "pins": {"pipeline_parallel_size": 2},
    },
    "plan-compress": {"goal": "compress", "source": "team"},
}  # fmt: skip
SERVED = made(
    model=LLAMA_70B, tensor_parallel_size=4, data_parallel_size=2, weight_dtype="fp8",
    kv_cache_dtype="fp8", max_batch_tokens=8192, chunked_prefill=True,
    speculative={"draft_model": "org/tiny", "tokens": 5},
)  # fmt: skip
SERVED_ON_NODES = made(
    model=MIXTRAL, tensor_parallel_size=8, expert_parallel_size=8, pipeline_parallel_size=2,
    nodes=2, weight_dtype="int4", offload={"weights_cpu": 0.25},
)  # fmt: skip
TRAINED = trained(
    model=LLAMA_70B, nodes=4, data_parallel_size=4, tensor_parallel_size=8, sequence_parallel=True,
    zero_stage=1, activation_recomputation="selective", attention="flash",
    workload={"tokens": 10**9, "global_batch_size": 64},
)  # fmt: skip
CASES = {"serve": SERVED, "nodes": SERVED_ON_NODES, "train": TRAINED}
TRAINERS = ("torchrun", "accelerate", "deepspeed", "torchtitan", "megatron")
MANAGERS = ("slurm", "kubernetes", "compose")
EXPORTS = [
    (tool, case)
    for tool in sorted(FORMATS)
    for case in CASES
    if tool in MANAGERS or (tool in TRAINERS) == (case == "train")
]


@pytest.fixture
def host_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSide:
    return HostSide(tmp_path, monkeypatch)


def stored_text(document: Any, tmp_path: Path) -> str:
    return with_placeholders(json_text(document), {str(tmp_path): "FOLDER"})


@pytest.mark.parametrize("name", SPECS)
def test_a_host_starts_a_spec_as_stored(
    name: str, host_side: HostSide, tmp_path: Path, is_rewriting: bool
) -> None:
    entry = SPECS[name]
    gpus = [
        {"kind": "gpu", "index": at, "uuid": f"GPU-{at}"} for at in range(entry.get("gpus", 0))
    ]
    fields = {"spec": entry["spec"], "gang": entry.get("gang"), "devices": gpus}
    secrets = entry.get("secrets", {})
    fields["spec"] = {"secrets": list(secrets), **entry["spec"]}
    fields["max_duration_seconds"] = entry.get("max_duration_seconds")
    request = RunRequest.model_validate(
        {"attempt_id": "attempt", "job_id": "job", "number": 1, "fence": "f", **fields}
    )

    found = host_side.launched(request, secrets, **entry.get("config", {}))

    BOOK.compare(name, stored_text(found, tmp_path), is_rewriting=is_rewriting)


JOB_FIELDS = (
    "name", "model_name", "state", "num_hosts", "devices_per_host", "max_duration_seconds",
    "max_retries", "priority", "prediction",
)  # fmt: skip


def launched(plan: Plan, entry: dict[str, Any], host_side: HostSide) -> dict[str, Any]:
    """Return the job of a plan, and what each of its hosts starts; a refusal is its sentence."""
    engine = entry.get("engine")
    endpoint = {"run": "endpoint", "idle_stop_seconds": 90.0, "engine": engine} if engine else {}
    keys = KEY_HASHES if engine else ()
    try:
        job = plan_launch(plan=plan, by=plan.owner, launch=Launch(**endpoint), key_hashes=keys)
    except DraftProblem as problem:
        return {"refused": problem.sentence, "field": problem.field}
    return {
        "job": {name: getattr(job, name) for name in JOB_FIELDS},
        "hosts": [host_side.launched(claim(member), {}) for member in members(job)],
    }


@pytest.mark.django_db(databases="__all__")
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_launched_as_stored(
    name: str, plan_of: Any, team: Any, host: Host, host_side: HostSide, tmp_path: Path,
    is_rewriting: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    entry = PLANS[name]
    plan = plan_of(entry["goal"], entry["source"])
    plan.draft["pins"] |= entry.get("pins", {})
    if count := entry.get("gpus"):
        gpus = [GPU | {"index": at, "uuid": f"GPU-{at}"} for at in range(count)]
        host_beat(host=host, beat=make_beat(facts=make_facts(gpus=gpus)))
    if count := entry.get("hosts"):
        hosts = make_hosts(team, count)
        Host.objects.filter(pk__in=[each.pk for each in hosts]).update(microbench=host.microbench)
        Host.objects.filter(pk=host.pk).update(state="draining")
        plan.draft["hardware"] |= {"host": None, "pool": hosts[0].pool_id}
    plan.save()

    found = launched(plan, entry, host_side)

    assert Job.objects.exists() == ("job" in found)
    BOOK.compare(name, stored_text(found, tmp_path), is_rewriting=is_rewriting)


@pytest.mark.parametrize(("tool", "case"), EXPORTS)
def test_an_export_is_the_stored_one(tool: str, case: str, is_rewriting: bool) -> None:
    found = export(tool, CASES[case])
    notes = "".join(f"# note: {note}\n" for note in found.notes)
    text = f"# {found.title}: {found.file_name}\n{notes}\n{found.text}\n# measure\n{found.measure}"

    EXPORT_BOOK.compare(f"export-{tool}-{case}", text, is_rewriting=is_rewriting)


def test_every_stored_launch_has_an_entry(is_rewriting: bool) -> None:
    BOOK.compare_entries([*SPECS, *PLANS], is_rewriting=is_rewriting)
    names = [f"export-{tool}-{case}" for tool, case in EXPORTS]
    EXPORT_BOOK.compare_entries(names, is_rewriting=is_rewriting)
