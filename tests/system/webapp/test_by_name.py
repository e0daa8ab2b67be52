"""Models by their repository's name on a real site and host: each goal, engine and fault.

The hub is this process's own; its repositories are small models of real architectures.
"""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.hub.hub_server import Hub
from tests.hub.models import ARCHITECTURES, make_repositories
from tests.stack import HOST_SLUG, Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LOG = logging.getLogger(__name__)  # shown by --log-cli-level=INFO
WORK: dict[str, dict[str, Any]] = {
    "generate": {"input_tokens": 16, "output_tokens": 8, "batch_size": 2},
    "serve": {"input_tokens": 64, "output_tokens": 64, "concurrency": 2},
    "finetune": {
        "method": "lora", "sequence_length": 128, "global_batch_size": 2, "tokens": 1000,
    },
    "compress": {"method": "int8_weight_only"},
}  # fmt: skip


class Site:
    """A site whose host asks the test's hub, and a person who launches by name."""

    def __init__(self, stack: Stack, hub: Hub) -> None:
        self.stack, self.hub, self.alice = stack, hub, stack.client("alice")
        self.cache = Path(stack.environment["HF_HOME"]) / "hub"

    def launch(
        self,
        goal: str,
        model: str,
        data: str = "",
        work: Mapping[str, Any] = {},
        **launch: Any,
    ) -> tuple[int, dict[str, Any]]:
        named = ({"data_repository": data} if data else {}) | work
        document = {
            "goal": goal, "model": model, "workload": WORK[goal] | named,
            "hardware": {"host": HOST_SLUG}, "launch": launch,
        }  # fmt: skip
        status, _, text = self.alice.request(
            "POST", "/api/v1/jobs", json.dumps(document),
            Content_Type="application/json", X_CSRFToken=self.alice.csrf_token,
        )  # fmt: skip
        answer = json.loads(text)
        return status, answer.pop("job", {}) | answer

    def job(self, answer: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.alice.json(f"/api/v1/jobs/{answer['id']}")
        return found

    def endpoint(self, answer: dict[str, Any]) -> dict[str, Any]:
        def serving() -> dict[str, Any] | None:
            job = self.job(answer)
            assert not job["is_final"], job["outcome"]
            return job["endpoint"]

        return wait_for(serving, f"{answer['name']} to serve", every_s=0.5)

    def ended(self, answer: dict[str, Any]) -> dict[str, Any]:
        def final() -> dict[str, Any] | None:
            job = self.job(answer)
            return job if job["is_final"] else None

        return wait_for(final, f"the end of {answer['name']}", every_s=0.5)

    def stop(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.alice.get(f"/jobs/{answer['id']}/")
        self.alice.post(f"/jobs/{answer['id']}/stop/", {})
        return self.ended(answer)


def hub_variables(hub: Hub, folder: Path) -> dict[str, str]:
    """What a site is started with, to ask the test's hub and keep its files in a folder."""
    return {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0", "NO_PROXY": "*",
    }  # fmt: skip


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("repositories")
    make_repositories(folder)
    return folder


@pytest.fixture
def site(tmp_path, repositories) -> Iterator[Site]:
    with Hub(repositories) as hub:
        with Stack(tmp_path / "site", **hub_variables(hub, tmp_path)) as stack:
            yield Site(stack, hub)


def test_every_architecture_is_generated_tuned_and_compressed_by_name(site):
    wrong = {}
    for kind in ARCHITECTURES:
        for goal in ("generate", "finetune", "compress"):
            status, answer = site.launch(goal, f"tiny/{kind}")
            job = site.ended(answer) if status == 201 else {"state": answer}
            if job["state"] != "succeeded":
                wrong[kind, goal] = (job["state"], job.get("outcome"))
    assert wrong == {}
    sent = site.hub.large_sent
    stored = sum(path.stat().st_size for path in site.hub.folder.glob("tiny/*/*.safetensors"))
    assert sent <= stored  # each file once, whatever the number of jobs


def test_a_model_is_evaluated_by_name_alone_or_beside_another(site):
    for original in ("", "tiny/llama"):
        status, answer = site.launch("generate", "tiny/llama", run="evaluation", original=original)
        assert status == 201, answer
        job = site.ended(answer)
        assert job["state"] == "succeeded", job["outcome"]
        assert job["result"]["measured"]["perplexity"] > 1
        kl = job["result"]["measured"].get("kl_divergence_nats")
        assert kl is None if not original else abs(kl) < 1e-6
    status, answer = site.launch("generate", "tiny/llama", run="evaluation", original="tiny/none")
    assert status >= 400
    assert "has no repository" in answer["detail"]


def test_a_model_is_tuned_on_data_sets_by_name(site):
    site.hub.branches = {"datasets/tiny/scripted@refs/convert/parquet": "datasets/tiny/chats"}
    for name, read in (
        ("hf.co/datasets/tiny/chats", "tiny/chats/train.parquet (chat"),
        ("tiny/lines", "tiny/lines/train.jsonl (instruction"),
        ("tiny/scripted", "tiny/scripted/train.parquet (chat"),
    ):
        status, answer = site.launch("finetune", "tiny/llama", name)
        assert status == 201, answer
        job = site.ended(answer)
        assert job["state"] == "succeeded", job["outcome"]
        assert job["result"]["notes"]["data"].startswith(read)
    stored = sorted(path.name for path in site.cache.glob("datasets--tiny--*/snapshots/*/*"))
    assert stored == ["README.md", "data", "data", "train.jsonl"]
    for name, words in (
        ("tiny/none", "has no repository 'datasets/tiny/none'"),
        ("tiny/chats:dev", "no split 'dev': it has test, train"),
        ("tiny/scripted@main", "never runs here"),
    ):
        status, answer = site.launch("finetune", "tiny/llama", name)
        assert status >= 400
        assert words in answer["detail"]
        assert answer["errors"][0]["field"] == "workload.data_repository"


def test_other_jobs_read_data_sets_by_name(site):
    sources = [{"source": "host"}, {"source": "hub", "path": "tiny/lines"}]
    renamed = {"data_columns": "instruction=prompt, output=completion", "data_records": 3}
    for goal, data, work, launch in (
        ("generate", "tiny/lines", renamed, {}),
        ("generate", "tiny/chats:test", {}, {"run": "evaluation"}),
        ("compress", "tiny/chats", {"method": "gptq", "data_records": 20}, {}),
        ("finetune", "", {"data_source": "mixed", "mixture": sources}, {}),
    ):
        status, answer = site.launch(goal, "tiny/llama", data, work, **launch)
        assert status == 201, answer
        job = site.ended(answer)
        assert job["state"] == "succeeded", job["outcome"]
        measured, notes = job["result"]["measured"], job["result"]["notes"]
        if goal == "generate" and not launch:
            assert measured["prompts"] == 3
        if launch:
            assert "20 records of tiny/chats/test.parquet" in notes["perplexity"]
        if goal == "finetune":
            assert "tiny/lines/train.jsonl" in notes["data"]
    stored = {path.name for path in site.cache.glob("datasets--tiny--chats/snapshots/*/data/*")}
    assert "train-00001-of-00002.parquet" not in stored  # 20 records are in the first file
    for goal, data, work, field in (
        ("generate", "tiny/chats:dev", {}, "workload.data_repository"),
        ("generate", "tiny/lines", {"data_columns": "a=b"}, "workload.data_columns"),
        (
            "finetune",
            "",
            {
                "data_source": "mixed",
                "mixture": [*sources[:1], {"source": "hub", "path": "tiny/no"}],
            },
            "workload.mixture.1.path",
        ),
    ):
        status, answer = site.launch(goal, "tiny/llama", data, work)
        named = answer["errors"][0]["field"].removeprefix("body.")
        assert (status >= 400, named) == (True, field)
    status, answer = site.launch("compress", "tiny/llama", "tiny/chats", {"method": "gguf"})
    assert status >= 400
    assert "GGUF calibrates on no data set" in answer["detail"]


def test_an_awq_repository_is_refused_by_name_where_no_engine_reads_it(site):
    """On processors vLLM alone reads it, whose environment is built by those who want it."""
    words = {
        "slipway": "quantised by awq, which Slipway's own engine and jobs do not read",
        "llamacpp": "reads GGUF",
        "sglang": "Choose a host with a GPU",
    }
    for engine, said in words.items():
        status, answer = site.launch("serve", "tiny/llama-AWQ", run="endpoint", engine=engine)
        assert status >= 400
        assert said in answer["detail"], answer["detail"]
    status, answer = site.launch("compress", "tiny/llama-AWQ")
    assert status >= 400
    assert "serve this one with vLLM or SGLang" in answer["detail"]


def test_endpoints_by_name_answer_openais_own_client(site):
    adapter_of = site.ended(site.launch("finetune", "tiny/llama")[1])
    assert adapter_of["state"] == "succeeded"
    for model, launch in (
        *((f"tiny/{kind}", {}) for kind in ARCHITECTURES),
        ("tiny/llama", {"adapters": True}),
        ("tiny/llama-GGUF:Q8_0", {"engine": "llamacpp"}),
    ):
        began = time.monotonic()
        status, answer = site.launch("serve", model, run="endpoint", **launch)
        assert status == 201, answer
        endpoint = site.endpoint(answer)
        client = openai.OpenAI(base_url=endpoint["url"], api_key=answer["endpoint_key"])
        names = [each.id for each in client.models.list()]
        assert len(names) == (2 if launch.get("adapters") else 1), names
        for name in names:
            said = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "A cache"}], max_tokens=8
            )
            assert said.usage.completion_tokens >= 1
            waited = time.monotonic() - began
            engine = launch.get("engine", "slipway")
            LOG.info("%-24s %-10s first answer after %5.1f s", model, engine, waited)
        assert site.stop(answer)["state"] == "stopped"


def test_a_download_goes_on_after_kill_9_of_the_job_and_of_the_agent(site):
    size = (site.hub.folder / "tiny/llama/model.safetensors").stat().st_size
    for killed in ("runners.jobs.fetch", "runners work"):
        before = site.hub.large_sent
        site.hub.hold_at = before + size // 3
        site.hub.held.clear()
        site.hub.go_on.clear()
        _, answer = site.launch("generate", "tiny/llama")
        assert site.hub.held.wait(120)
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if killed in words and str(site.stack.folder) in words:
                os.kill(process.pid, signal.SIGKILL)
        site.hub.hold_at = -1
        site.hub.go_on.set()
        if killed == "runners work":
            site.stack.restart("host")
        job = site.ended(answer)
        if killed == "runners.jobs.fetch":
            assert job["state"] in {"failed", "error"}, job["outcome"]
        else:  # the agent is not needed for a download, nor for a job
            assert job["state"] == "succeeded", job["outcome"]
    assert site.hub.large_sent < 1.5 * size


def test_each_fault_is_refused_or_ends_the_job_with_its_reason_and_no_half_model(site):
    hub = site.hub
    for model, fault, words in (
        ("tiny/none", {}, "has no repository"),
        ("tiny/llama@gone", {}, "gone"),
        ("tiny/llama", {"gated": {"tiny/llama": "manual"}}, "is gated"),
        ("tiny/llama", {"private": {"tiny/llama"}}, "HF_TOKEN"),
        ("tiny/llama", {"renamed": {"tiny/llama": "tiny/other"}}, "tiny/other"),
    ):
        before = {name: getattr(hub, name) for name in fault}
        for name, value in fault.items():
            setattr(hub, name, value)
        status, answer = site.launch("generate", model)
        assert status >= 400, (model, fault)
        assert words in answer["detail"], answer
        for name, value in before.items():
            setattr(hub, name, value)
    for fault in ("corrupted", "truncated"):
        getattr(hub, fault)["model.safetensors"] = 99
        job = site.ended(site.launch("generate", "tiny/qwen3")[1])
        assert job["outcome"]["reason"] == "download_failed", job
        assert not list(site.cache.glob("models--tiny--qwen3/snapshots/*/model.safetensors"))
        getattr(hub, fault).clear()
    assert site.ended(site.launch("generate", "tiny/qwen3")[1])["state"] == "succeeded"
