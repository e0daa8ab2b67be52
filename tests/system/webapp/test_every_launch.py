"""Every goal and every option of the launch form, through a real `up` to a real agent's job.

Each row of the table posts the launch form of a plan; its job is claimed by the host, starts, and
ends as it should. Endpoints are stopped once they answer. Rows are in order: the first train the
models and adapters that later ones name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from tests.stack import HOST_SLUG, ApiClient, free_port, wait_for
from tests.system.running_up import RunningUp, spare_the_benchmark
from webapp.jobs.artefacts import ADAPTER_ID_LENGTH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SECRET = "HF_TOKEN"
TRAINED = {"sequence_length": 256, "global_batch_size": 2, "tokens": 1000}  # two steps
ASKED = {"input_tokens": 16, "output_tokens": 8}
LOAD = {"run": "load", "requests_per_repetition": "2", "repetitions": "1"}


class Row(NamedTuple):
    """A launch: its plan's document, its launch form, and what its job has or the form says."""

    name: str
    goal: str
    workload: dict[str, Any]
    launch: dict[str, str]  # what is put into the launch form
    job: dict[str, Any] = {}  # parts of the API's answer, by path
    model: str = "base"  # or another row, whose job left it
    clone: str = ""  # the row whose job's plan is changed, in place of a new plan
    ends: str = "succeeded"
    refusal: str = ""  # of a launch that this host cannot run


def of_training(name: str, launch: dict[str, str], job: dict[str, Any], **workload: Any) -> Row:
    return Row(name, "finetune", TRAINED | workload, launch, job)


def of_generation(name: str, launch: dict[str, str], job: dict[str, Any]) -> Row:
    return Row(name, "generate", ASKED | {"batch_size": 2}, launch, job)


def of_serving(name: str, launch: dict[str, str], job: dict[str, Any], **more: str) -> Row:
    return Row(name, "serve", ASKED | {"concurrency": 2}, launch, job, **more)


def of_endpoint(name: str, launch: dict[str, str], job: dict[str, Any], **more: str) -> Row:
    return of_serving(name, {"run": "endpoint", **launch}, job, **{"ends": "stopped", **more})


def refused(name: str, launch: dict[str, str], refusal: str) -> Row:
    return of_endpoint(name, launch, {}, refusal=refusal)


ROWS = (
    Row(
        "base", "pretrain", TRAINED, {"max_duration_seconds": "0.5", "max_retries": "1"},
        {"max_duration_seconds": 1800.0, "max_retries": 1}, model="demo",
    ),
    of_training("full", {"priority": "low", "secrets": SECRET}, {"priority": "low", "spec.secrets": [SECRET]}, method="full"),
    of_training("first", {}, {"spec.lora.rank": 4}, method="lora", lora_rank=4),
    Row("int8", "compress", {"method": "int8_weight_only"}, {}, {"spec.method": "int8"}),
    Row("gguf", "compress", {"method": "gguf"}, {}, {"spec.gguf_type": "Q4_K_M"}),
    of_generation("generated", {}, {"spec.adapters": []}),
    of_generation("drafted", {"draft_model": "full"}, {"spec.speculation.method": "draft"}),
    of_generation("adapted", {"adapter": "first"}, {"spec.adapters.0.name": "first"}),
    of_generation("each its own", {"adapter": "all"}, {"spec.adapters.0.name": "first"}),
    of_serving("measured", {}, {"kind": "benchmark", "spec.profile": False}),
    of_serving("profiled", {"profile": "on"}, {"spec.profile": True}),
    of_serving("next version", {"save_as": "next"}, {"plan.version": 2}, clone="measured"),
    of_serving("plan of its own", {"save_as": "new"}, {"plan.version": 1}, clone="measured"),
    of_serving("closed", LOAD | {"points": "1, 2"}, {"spec.load.requests_per_repetition": 2}),
    of_serving("open", LOAD | {"arrivals": "open", "points": "4"}, {"spec.load.arrivals.kind": "open"}),
    of_serving(
        "burst", LOAD | {"arrivals": "burst", "points": "2", "repetitions": "2"},
        {"spec.load.arrivals.kind": "burst", "spec.load.repetitions": 2},
    ),
    of_endpoint("idle", {"idle_stop_seconds": "0.1"}, {"spec.idle_stop_seconds": 6.0}, ends="succeeded"),
    of_endpoint("with adapters", {"adapters": "on"}, {"spec.adapters.0.name": "first"}),
    of_endpoint("llama.cpp", {"engine": "llamacpp"}, {"spec.engine": "llamacpp"}, model="gguf"),
    Row("untrained", "finetune", TRAINED, {}, model="demo", refusal="Train the demo model first"),
    refused("no gguf", {"engine": "llamacpp"}, "“Engine” is llamacpp, which is not offered here; choose one of: slipway."),
    refused("vllm", {"engine": "vllm"}, "“Engine” is vllm, which is not offered here"),
    refused("sglang", {"engine": "sglang"}, "“Engine” is sglang, which is not offered here"),
    refused("prefix", {"prefix_caching": "yes"}, "own engine reads every prompt again"),
    refused("lookup", {"draft_model": "lookup"}, "“Speculative decoding” is lookup, which is not offered here"),
)  # fmt: skip


def part_of(answer: Any, path: str) -> Any:
    """Return a part of an answer, such as ``spec.adapters.0.name``."""
    for name in path.split("."):
        answer = answer[int(name)] if isinstance(answer, list) else answer[name]
    return answer


class Walk:
    """A person at the launch forms of a running site."""

    def __init__(self, running: RunningUp) -> None:
        (password,) = re.findall(r"password[: ]+(\S{12,})", running.words)
        self.admin = ApiClient(running.port, "admin", password)
        self.admin.choose_password(password)
        wait_for(lambda: "Ready" in self.admin.get(f"/hosts/{HOST_SLUG}/"), "a ready host")
        self.admin.post("/settings/secrets/save/", {"name": SECRET, "value": "hf_canary"})
        self.models, self.adapters = {"demo": "demo"}, dict[str, str]()  # what jobs left
        self.pages = dict[str, str]()  # of jobs

    def take(self, row: Row) -> str:
        """Launch and follow a job to its end; return what went wrong, "" if nothing did."""
        page, text = self.launch(row)
        if not page.startswith("/jobs/"):
            return "" if row.refusal and row.refusal in text else f"refused: {text}"
        job = self.end_of(page, row)
        job["plan"] = self.admin.json(f"/api/v1/plans/{job['plan']}")
        self.note_what_it_left(row, job)
        expected = {"state": row.ends, **row.job}
        found = {path: part_of(job, path) for path in expected}
        wanted = {path: self.adapters.get(str(value), value) for path, value in expected.items()}
        return "" if found == wanted and not row.refusal else f"{found} {job['outcome']}"

    def plan(self, row: Row) -> str:
        """Return the id of the row's plan."""
        if row.clone:
            _, page = self.admin.post(f"{self.pages[row.clone]}clone/", {})
            plan = page.split("/")[2]
            fields = {**row.workload, "prefix_share_ratio": 0, "concurrency": 1, "go": "next"}
            self.admin.post(f"/plans/{plan}/edit/workload/", fields)
            return plan
        document = {
            "goal": row.goal, "model": self.models[row.model], "workload": row.workload,
            "hardware": {"host": HOST_SLUG},
        }  # fmt: skip
        status, _, text = self.admin.request(
            "POST", "/api/v1/plans", json.dumps(document),
            Content_Type="application/json", X_CSRFToken=self.admin.csrf_token,
        )  # fmt: skip
        assert status == 201, text
        return str(json.loads(text)["id"])

    def launch(self, row: Row) -> tuple[str, str]:
        """Post the form; return where it leads, "" if it is shown again, and the page."""
        named: dict[str, Mapping[str, str]] = {
            "draft_model": self.models,
            "adapter": self.adapters,
        }
        given = {
            name: named[name].get(value, value) if name in named else value
            for name, value in row.launch.items()
        }
        form = {"run": "job", "name": row.name, **given}
        form["csrfmiddlewaretoken"] = self.admin.csrf_token
        _, headers, text = self.admin.request(
            "POST", f"/plans/{self.plan(row)}/launch/", urlencode(form),
            Content_Type="application/x-www-form-urlencoded",
            Referer=f"http://127.0.0.1:{self.admin.port}/",
        )  # fmt: skip
        self.pages[row.name] = page = headers.get("Location", "")
        return page, unescape(text)

    def end_of(self, page: str, row: Row) -> dict[str, Any]:
        """Return the API's answer about a job that has ended; end an endpoint once it serves."""

        def ended() -> dict[str, Any] | None:
            job: dict[str, Any] = self.admin.json(f"/api/v1/jobs/{page.split('/')[2]}")
            if job["endpoint"] and row.ends == "stopped":
                self.admin.post(f"{page}stop/", {})
            return job if job["is_final"] else None

        return wait_for(ended, f"the end of {row.name}", every_s=0.5)

    def note_what_it_left(self, row: Row, job: dict[str, Any]) -> None:
        listed = self.admin.json("/api/v1/models")["items"]
        new = {each["id"] for each in listed if each["source"] == "job"} - {*self.models.values()}
        self.models |= dict.fromkeys([row.name][: len(new)], next(iter(new), ""))
        end = job["attempts"][-1]["id"][-ADAPTER_ID_LENGTH:].lower()
        self.adapters |= {row.name: f"{row.name}-{end}"} if row.workload.get("lora_rank") else {}


@pytest.fixture
def walk(tmp_path) -> Iterator[Walk]:
    running = RunningUp(tmp_path / "data", free_port(), SLIPWAY_DEMO_SECONDS="6")
    try:
        spare_the_benchmark(running.wait_until_ready())
        yield Walk(running)
    finally:
        running.end_by_force()


def test_every_launch_is_claimed_started_and_ended_as_expected(walk):
    wrong = {row.name: said for row in ROWS if (said := walk.take(row))}

    assert wrong == {}
