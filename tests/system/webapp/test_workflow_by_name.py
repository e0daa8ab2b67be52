"""A repository is tuned, evaluated, compressed and served as one workflow, killed in each step."""

import json
import os
import signal
from typing import Any

import openai
import psutil
import pytest

from tests.stack import HOST_SLUG, wait_for
from tests.system.webapp.test_by_name import Site, repositories, site  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = [
    {
        "goal": "finetune", "model": "tiny/llama", "hardware": {"host": HOST_SLUG},
        "workload": {
            "method": "lora", "sequence_length": 128, "global_batch_size": 2, "tokens": 60_000,
        },
    },
    {"goal": "evaluate"},
    {"goal": "compress", "workload": {"method": "awq"}},
    {
        "goal": "serve", "workload": {"input_tokens": 64, "output_tokens": 64, "concurrency": 2},
        "launch": {"run": "endpoint"},
    },
]  # fmt: skip
MODULES = ("train", "evaluate", "compress", "serve")


class Chain:
    """A workflow of the site's person."""

    def __init__(self, site: Site, steps: list[dict[str, Any]]) -> None:
        self.site = site
        status, answer = self.post("/api/v1/workflows", {"steps": steps})
        assert status == 201, answer
        self.key, self.id = answer["endpoint_key"], answer["workflow"]["id"]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        alice = self.site.alice
        status, _, text = alice.request(
            "POST", path, json.dumps(body),
            Content_Type="application/json", X_CSRFToken=alice.csrf_token,
        )  # fmt: skip
        return status, json.loads(text)

    def resume(self) -> dict[str, Any]:
        """Resume it; once its host has said what the job left."""
        status, answer = self.post(f"/api/v1/workflows/{self.id}/resume", {})
        assert status == 200 or answer["code"] == "still_live", answer
        return {"state": ""} | answer

    @property
    def now(self) -> dict[str, Any]:
        found: dict[str, Any] = self.site.alice.json(f"/api/v1/workflows/{self.id}")
        return found

    def wait(self, words: str, is_so: Any) -> dict[str, Any]:
        def ask() -> dict[str, Any] | None:
            workflow = self.now
            return workflow if is_so(workflow) else None

        return wait_for(ask, words, every_s=0.5)


def kill_job_of(module: str, folder: str) -> None:
    """Kill -9 the process that runs a kind of job of a site, once it runs."""

    def killed() -> bool:
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if f"runners.jobs.{module}" in words and folder in words:
                os.kill(process.pid, signal.SIGKILL)
                return True
        return False

    wait_for(killed, f"a process of {module}", every_s=0.1)


def test_tune_evaluate_compress_and_serve_killed_in_each_step_and_resumed(site):
    chain = Chain(site, STEPS)
    assert chain.now["forecast"]["duration_seconds"]["value"] > 0
    for position, module in enumerate(MODULES):
        chain.wait(
            f"step {position} to run",
            lambda found, at=position: found["steps"][at]["job_state"] == "running",
        )
        kill_job_of(module, str(site.stack.folder))
        failed = chain.wait("the end", lambda found: found["state"] != "running")
        states = [each["state"] for each in failed["steps"]]
        assert states == ["succeeded"] * position + ["failed"] + ["waiting"] * (3 - position)
        wait_for(lambda: chain.resume()["state"] == "running", "the workflow to go on")
        if module != "serve":
            chain.wait(
                f"the end of step {position}",
                lambda found, at=position: found["steps"][at]["state"] == "succeeded",
            )
    serving = chain.wait("an endpoint", lambda found: found["steps"][3]["job_state"] == "running")
    trained, evaluated, compressed, served = serving["steps"]
    assert evaluated["measured"]["perplexity"] > 0
    assert compressed["measured"]["disk_bytes"] < trained["measured"]["disk_bytes"]
    endpoint = site.endpoint({"id": served["job"], "name": "the endpoint"})
    client = openai.OpenAI(base_url=endpoint["url"], api_key=chain.key)
    said = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "A cache"}],
        max_tokens=8,
    )
    assert said.usage.completion_tokens >= 1
    assert chain.post(f"/api/v1/workflows/{chain.id}/stop", {})[0] == 200
    assert site.ended({"id": served["job"], "name": "the endpoint"})["state"] == "stopped"
    spec = site.job({"id": trained["job"]})["spec"]
    assert spec["learning_rate"] == pytest.approx(2e-4)
    for chunk, model in (("trained", trained), ("compressed", compressed)):
        assert model["model"], chunk
