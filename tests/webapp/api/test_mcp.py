"""The tools of ``slipway mcp``, called by the official client: reading, planning, launching."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from typing import get_args

import httpx
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from planner.specs.estimate import Objective
from planner.specs.workload import Strategy
from runners.cli.mcp import tools
from runners.client import Slipway
from runners.plans.document import GOALS, HardwareChoice
from runners.plans.fields import shown_of
from runners.plans.launch import Run
from runners.plans.workloads import WORKLOADS
from tests.webapp.api.test_client import by_django
from tests.webapp.conftest import client_of
from webapp.accounts.tokens import token_make
from webapp.jobs.models import Job, LaunchRequest
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__", transaction=True)


def agent(user, team, scope: str, budget: float | None = None):
    """Return a way to call a tool as an agent with a token of its own."""
    token = token_make(team=team, by=user, name="agent", scope=scope, budget_gpu_hours=budget)[1]
    wire = httpx.Client(transport=httpx.MockTransport(by_django))
    served = tools(Slipway("http://testserver", token, client=wire))

    def call(name: str, **arguments):
        async def ask():
            async with Client(served) as client:
                return await client.call_tool(name, arguments)

        answer = asyncio.run(ask())
        text = "".join(part.text for part in answer.content)
        if answer.is_error:
            return text
        return json.loads(text) if text.startswith(("{", "[")) else text

    call.served = served
    return call


def test_every_tool_says_what_it_does_and_whether_it_only_reads(alice, team):
    served = agent(alice, team, "read").served

    async def listed():
        async with Client(served) as client:
            return (await client.list_tools()).tools

    found = {tool.name: tool for tool in asyncio.run(listed())}
    writes = {"plan", "import_command", "launch", "stop"}
    assert {name for name, each in found.items() if not each.annotations.read_only_hint} == writes
    assert all(each.description for each in found.values())
    inputs = {
        (tool, name): field
        for tool, each in found.items()
        for name, field in each.input_schema["properties"].items()
    }
    assert inputs["plan", "goal"]["enum"] == [*GOALS]
    assert inputs["plan", "objective"]["enum"] == [*get_args(Objective)]
    assert inputs["launch", "run"]["enum"] == [*get_args(Run)]
    assert (inputs["launch", "hours"]["minimum"], inputs["launch", "hours"]["maximum"]) == (
        0.01,
        8784,
    )
    assert (
        inputs["plan", "host"]["description"] == shown_of(HardwareChoice.model_fields["host"]).help
    )
    said = re.split(r"\W+", inputs["plan", "workload"]["description"])
    assert {name for work in WORKLOADS.values() for name in work.model_fields} <= {*said}
    assert {*Strategy.model_fields} <= {*re.split(r"\W+", inputs["plan", "pins"]["description"])}
    assert found["stop"].annotations.destructive_hint
    assert served.version


def test_an_agent_plans_and_reads_and_is_refused_a_launch_without_an_approval(
    alice, bob, team, host
):
    call = agent(alice, team, "plan")
    forgotten = call("plan", goal="pretrain", model="demo", host=host.slug)
    assert (forgotten["plan_id"], bool(forgotten["best"])) == (None, True)
    assert not Plan.objects.exists()
    plan = call("plan", goal="pretrain", model="demo", host=host.slug,
                workload={"time_budget_seconds": 60}, keep=True)  # fmt: skip
    assert plan["can_launch"], plan
    assert plan["best"]["performance"]
    assert call("explain", plan_id=plan["plan_id"])["rejected"] is not None
    asked = call("launch", plan_id=plan["plan_id"], reason="to measure", hours=1)
    assert (asked["state"], asked["approve_at"]) == ("waiting", "http://testserver/approvals/")
    assert not Job.objects.exists()
    client_of(bob).post(f"/approvals/{asked['launch_request']}/approve/")
    decided = call("launch_request", request_id=asked["launch_request"])
    assert (decided["state"], decided["job"]) == ("approved", Job.objects.get().pk)
    assert call("job", job_id=decided["job"])["state"] == "preflight"
    assert call("jobs")["id"] if isinstance(call("jobs"), dict) else call("jobs")
    refused = call("stop", job_id=decided["job"])
    assert "needs the scope launch" in refused


def test_a_budget_launches_and_what_is_over_it_is_told(alice, team, host):
    call = agent(alice, team, "launch", budget=2)
    plan = call("plan", goal="pretrain", model="demo", host=host.slug, keep=True)["plan_id"]
    job = call("launch", plan_id=plan, reason="within", hours=1.5)["job"]
    assert job["id"] == Job.objects.get().pk
    assert call("whoami")["rest_gpu_hours"] == 0.5
    assert "may take 1 GPU-hours" in call("launch", plan_id=plan, reason="over", hours=1)
    assert call("stop", job_id=job["id"])["state"] in {"stopped", "stopping"}
    unlimited = agent(alice, team, "launch")
    assert unlimited("launch", plan_id=plan, reason="x", hours=1)["state"] == "waiting"
    assert LaunchRequest.objects.count() == Job.objects.count() == 1


def test_another_tools_command_becomes_a_plan_and_faults_are_sentences(alice, team, host):
    call = agent(alice, team, "plan")
    line = "vllm serve meta-llama/Llama-3.1-8B -tp 2 --made-up 1"
    found = call("import_command", text=line)
    assert found["unknown"][0]["source"] == "--made-up 1"
    assert (found["plan"]["plan_id"], bool(found["plan"]["verdict"])) == (None, True)
    assert not Plan.objects.exists()
    kept = call("import_command", text=line, keep=True)["plan"]["plan_id"]
    assert Plan.objects.get().pk == kept
    assert re.match(r"\d+ x .*, by default: give a host", found["planned_for"])
    at = call("import_command", text="vllm serve meta-llama/Llama-3.1-8B", host=host.slug)
    assert "by default" not in at["planned_for"]
    assert "not valid" in call("plan", goal="serve", model="demo", workload={"input_tokens": 0})
    assert "No object of your teams" in call("job", job_id="nothing")
    readonly = agent(alice, team, "read")
    assert "needs the scope plan" in readonly("plan", goal="serve", model="demo")


def test_a_server_started_by_the_command_ends_when_its_standard_input_closes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 60.0)  # a busy machine
    status = tmp_path / "status"  # not written if the client has to end the process group
    program = shlex.join([sys.executable, "-m", "runners.cli.main", "mcp"])
    parameters = StdioServerParameters(
        command="/bin/sh",
        args=["-c", f"{program}; echo $? > {shlex.quote(str(status))}"],
        env={"SLIPWAY_SERVER": "http://127.0.0.1:9", "SLIPWAY_TOKEN": "slp_x"},
        cwd=Path(__file__).parents[3],
    )

    async def listed():
        async with Client(stdio_client(parameters)) as client:
            return (await client.list_tools()).tools

    assert "launch" in {tool.name for tool in asyncio.run(listed())}
    assert status.read_text() == "0\n"
