"""``slipway mcp``: the server's plans, jobs and hosts as tools of the Model Context Protocol.

Agents read freely. A launch needs a token with a budget of GPU-hours; any other token asks a
person of the team, who approves or denies it in a browser. The tools speak over standard input
and output, and use the configured server and token.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field

from planner.specs.estimate import Objective
from planner.specs.units import HOUR
from planner.specs.workload import Strategy
from runners.cli.errors import CliError, ExitCode
from runners.cli.option_fields import parameter_of
from runners.cli.server import server
from runners.plans.document import GOALS, HardwareChoice, PlanDocument
from runners.plans.launch import Launch, Run
from runners.plans.workloads import WORKLOADS

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from planner.specs.estimate import Estimate, PlanAnswer
    from runners.client.generated import PlanReply, Slipway

SKILL = Path(__file__).with_name("SKILL.md")
MOST_LINES, MOST_ROWS, MOST_REASONS = 400, 50, 12
INSTRUCTIONS = """Slipway plans, runs and measures open language models on a team's own GPUs.

Ask `plan` first: it searches precision, layout, offload and engine, and returns figures with 80 %
intervals and their origin (modelled, measured, published). Say figures with their interval.
Plans are forgotten unless `keep` is true; `explain`, `export` and `launch` take a kept one.
`explain` has why other strategies lost. `launch` starts a job only within the token's budget;
otherwise it asks a person: give the reason, tell them the address, and read `launch_request`.
Never stop a job that you did not start unless you were asked to."""


def mcp(
    *,
    skill: Annotated[
        bool, typer.Option("--skill", help="Print the skill file for agents instead.")
    ] = False,
) -> None:
    """Serve the Model Context Protocol on standard input and output."""
    if skill:
        typer.echo(SKILL.read_text("utf-8"), nl=False)
        return
    with server() as client:
        tools(client).run("stdio")


def tools(client: "Slipway") -> "MCPServer[Any]":
    """Return the MCP server whose tools use a client.

    Raises:
        CliError: the SDK is not installed.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise CliError(
            "the MCP SDK is not installed: pip install 'slipway[mcp]'",
            code="not_installed",
            exit_code=ExitCode.FAILED,
        ) from error
    from functools import wraps

    from runners.client.transport import ApiError, UnreachableError

    # The client logs each request to the server at INFO, which is no message for the agent's host.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    made: MCPServer[Any] = MCPServer(
        "slipway", version=_version(), instructions=INSTRUCTIONS, log_level="WARNING"
    )

    def in_words(function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a refusal of the server reach the agent as the sentence that it is."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 (any tool)
            try:
                return function(*arguments, **named)
            except ApiError as error:
                fields = "; ".join(f"{one['field']}: {one['message']}" for one in error.errors)
                raise ToolError(f"{error.detail}{f' ({fields})' if fields else ''}") from error
            except UnreachableError as error:
                raise ToolError(str(error)) from error

        return call

    def register(functions: list[Callable[..., Any]], *, reads: bool, ends: bool = False) -> None:
        for function in functions:
            annotations = ToolAnnotations(
                read_only_hint=reads, destructive_hint=ends, open_world_hint=False
            )
            made.tool(annotations=annotations)(in_words(function))

    reading = Reading(client)
    register(reading.tools, reads=True)
    writing = Writing(client)
    register([writing.plan, writing.import_command, writing.launch], reads=False)
    register([writing.stop], reads=False, ends=True)
    return made


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slipway")
    except PackageNotFoundError:
        return "checkout"


def _fields(part: type[BaseModel]) -> str:
    """Return the names of fields, for a goal that has those of another one its name instead."""
    others = {id(work): (goal, work.model_fields) for goal, work in WORKLOADS.items()}
    goal, known = others.get(id(part.__base__), ("", {}))
    own = [name for name in part.model_fields if name not in known]
    return ", ".join([f"those of {goal}", *own] if goal else own)


def _field(part: type[BaseModel], name: str) -> Any:  # noqa: ANN401 (of an annotation)
    return parameter_of(part.model_fields[name])


Goal = Annotated[
    str,
    Field(
        description="; ".join(f"{goal}: {words}" for goal, (_, words) in GOALS.items()),
        json_schema_extra={"enum": [*GOALS]},
    ),
]
Host = Annotated[str, _field(HardwareChoice, "host")]
Workload = Annotated[
    dict[str, Any] | None,
    Field(
        description="What is left out has a usual value. Fields of "
        + "; ".join(f"{goal}: {_fields(part)}" for goal, part in WORKLOADS.items())
    ),
]
Pins = Annotated[
    dict[str, Any] | None,
    Field(description=f"Parts of the strategy that are fixed, of {_fields(Strategy)}"),
]


class Reading:
    """Tools that change nothing."""

    def __init__(self, client: "Slipway") -> None:
        self._client = client
        self.tools: list[Callable[..., Any]] = [
            self.whoami, self.document, self.explain, self.export, self.models, self.devices,
            self.hosts, self.jobs, self.job, self.logs, self.metrics, self.compare,
            self.launch_request,
        ]  # fmt: skip

    def whoami(self) -> dict[str, Any]:
        """Return the account, team, scope and what is left of the token's budget."""
        return _plain(self._client.get_me())

    def document(self, plan_id: str) -> dict[str, Any]:
        """Return a plan's document: goal, model, workload, hardware, pins and launch."""
        return dict(self._client.get_plan(plan_id).document)

    def explain(self, plan_id: str) -> dict[str, Any]:
        """Return why the other strategies of a plan lost, and how the best one was computed."""
        answer = self._client.get_plan(plan_id).answer
        if answer is None:
            return {"rejected": {}, "assumptions": []}
        rejected = sorted(answer.rejected.items(), key=lambda item: -item[1].strategies)
        return {
            "rejected": {name: _plain(each) for name, each in rejected[:MOST_REASONS]},
            "alternatives": [_figures(each) for each in answer.plans[1:]],
        }

    def export(self, plan_id: str, to: str) -> str:
        """Return a plan as another tool's arguments: vllm, sglang, llama_cpp, torchrun, slurm."""
        return self._client.export_plan(plan_id, to).text

    def models(self, find: str) -> list[dict[str, Any]]:
        """Find models of the team and the catalog by a part of their name."""
        return [_plain(each) for each in self._client.list_models(q=find, limit=MOST_ROWS).items]

    def devices(self, find: str) -> list[dict[str, Any]]:
        """Find devices of the hardware catalog by a part of their name."""
        return [_plain(each) for each in self._client.list_devices(q=find, limit=MOST_ROWS).items]

    def hosts(self) -> list[dict[str, Any]]:
        """Return the team's hosts: state, contact, pool and labels."""
        return [_plain(each) for each in self._client.paginate(self._client.list_hosts)]

    def jobs(self, state: str = "", limit: int = 20) -> list[dict[str, Any]]:
        """Return the newest jobs; ``state`` such as running or failed,stopped."""
        page = self._client.list_jobs(state=state, limit=min(limit, MOST_ROWS))
        return [_plain(each) for each in page.items]

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job: state, why it waits or ended, figures measured beside predicted."""
        found = _plain(self._client.get_job(job_id))
        figures = self._client.get_job_figures(job_id).figures
        left_out = ("spec", "prediction", "result")
        return {
            **{name: value for name, value in found.items() if name not in left_out},
            "figures": [_plain(each) for each in figures],
        }

    def logs(self, job_id: str, lines: int = 100, contains: str = "") -> str:
        """Return the last lines of a job's log, or of those that contain a text."""
        reply = self._client.get_job_log(job_id, limit=min(lines, MOST_LINES), q=contains)
        return "\n".join(line.text for line in reply.lines)

    def metrics(self, job_id: str, names: list[str]) -> list[dict[str, Any]]:
        """Return points of a job's metrics over time, at most 200 of each."""
        reply = self._client.get_job_series(job_id, metrics=",".join(names), points=200)
        return [_plain(each) for each in reply.series]

    def compare(self, job_ids: list[str]) -> dict[str, Any]:
        """Put the figures of two to four jobs side by side, and the settings that differ."""
        return _plain(self._client.compare_jobs(job=job_ids))

    def launch_request(self, request_id: str) -> dict[str, Any]:
        """Return whether a person approved a launch, and its job."""
        return _plain(self._client.get_launch_request(request_id))


class Writing:
    """Tools that make plans, and launch and stop jobs as the token permits."""

    def __init__(self, client: "Slipway") -> None:
        self._client = client

    def plan(  # noqa: PLR0913, PLR0917 (what an agent may say)
        self,
        goal: Goal,
        model: Annotated[str, _field(PlanDocument, "model")],
        host: Host = "",
        device: Annotated[str, _field(HardwareChoice, "device")] = "",
        devices_per_node: Annotated[int | None, _field(HardwareChoice, "devices_per_node")] = None,
        nodes: Annotated[int | None, _field(HardwareChoice, "nodes")] = None,
        workload: Workload = None,
        pins: Pins = None,
        objective: Annotated[Objective, _field(PlanDocument, "objective")] = "balanced",
        *,
        keep: bool = False,
    ) -> dict[str, Any]:
        """Plan a goal for a model on a host of the team, or on devices of the catalog (8xh100).

        A plan is computed and forgotten; ``keep`` saves it for the team, for explain, export and
        launch.
        """
        hardware: dict[str, Any] = {"host": host} if host else {}
        if device:
            counts = {"devices_per_node": devices_per_node, "nodes": nodes}
            given = {name: count for name, count in counts.items() if count is not None}
            hardware = {"device": device, **given}
        document: dict[str, Any] = {"goal": goal, "model": model, "objective": objective}
        document |= {
            name: value
            for name, value in (("hardware", hardware), ("workload", workload), ("pins", pins))
            if value
        }
        found = summary(self._client.create_plan(document, keep=keep))
        return _without_forgotten_id(found, keep=keep)

    def import_command(self, text: str, host: Host = "", *, keep: bool = False) -> dict[str, Any]:
        """Plan a vllm, sglang, llama-server or torchrun line, or a tool's YAML.

        The reply says for which hardware; without ``host`` that is the wizard's default. The plan
        is forgotten; ``keep`` saves it as a draft of the team, for explain, export and launch.
        """
        found = self._client.import_plan({"text": text, "host": host}, keep=keep)
        parts = {name: getattr(found, name) for name in ("understood", "ignored", "unknown")}
        hardware = _hardware_words(found.plan)
        if hardware and not host:
            hardware += ", by default: give a host, or plan with a device for other hardware"
        return {
            "plan": _without_forgotten_id(summary(found.plan), keep=keep),
            "planned_for": hardware,
            **parts,
            "missing": found.missing,
        }

    def launch(
        self,
        plan_id: str,
        reason: str,
        hours: Annotated[float, _field(Launch, "max_duration_seconds")],
        run: Annotated[Run, _field(Launch, "run")] = "job",
        name: Annotated[str, _field(Launch, "name")] = "",
    ) -> dict[str, Any]:
        """Launch a plan for at most ``hours``, within the token's budget; else ask a person.

        The reply has the job, or the request that a person approves at its address.
        """
        wanted: dict[str, Any] = {"run": run, "max_duration_seconds": hours * HOUR}
        wanted |= {"name": name} if name else {}
        me = self._client.get_me()
        if me.scope in {"launch", "admin"} and me.budget_gpu_hours is not None:
            return {"job": _plain(self._client.launch_plan(plan_id, wanted).job)}
        asked = self._client.request_launch(plan_id, {"launch": wanted, "reason": reason})
        return {
            "launch_request": asked.id,
            "state": asked.state,
            "approve_at": f"{self._client.base_url}{asked.url}",
        }

    def stop(self, job_id: str) -> dict[str, Any]:
        """Stop a job; it saves its results first."""
        found = self._client.stop_job(job_id)
        return {"id": found.id, "state": found.state}


def summary(plan: "PlanReply") -> dict[str, Any]:
    """Return what an agent needs of a plan: the verdict, the best plans, suggested changes."""
    answer: PlanAnswer | None = plan.answer
    return {
        "plan_id": plan.id,
        "name": plan.name,
        "verdict": plan.verdict_words.sentence,
        "detail": plan.verdict_words.detail,
        "warnings": [*plan.verdict_words.warnings, *plan.notes],
        "problem": plan.problem,
        "can_launch": plan.launch.can,
        "launch": plan.launch.text,
        "best": _figures(answer.plans[0]) if answer and answer.plans else None,
        "suggestions": [each.sentence for each in plan.suggestions],
        "page": plan.url,
    }


def _without_forgotten_id(plan: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return the summary of a plan, without the id and page that a forgotten one has not."""
    return plan if keep else {**plan, "plan_id": None, "page": None}


def _hardware_words(plan: "PlanReply") -> str:
    """Return for which hardware a plan was made: 8 x h200-sxm-141gb."""
    if plan.request is None:
        return ""
    cluster = plan.request.cluster
    device = cluster.device
    name = device if isinstance(device, str) else device.name or device.id
    return f"{cluster.num_devices} x {name}"


def _figures(estimate: "Estimate") -> dict[str, Any]:
    """Return a strategy with its figures: [low, value, high] in base units."""
    document = _plain(estimate)
    left_out = ("terms", "cluster", "steps", "timeline")
    return {name: value for name, value in document.items() if name not in left_out and value}


def _plain(model: "BaseModel") -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_none=True)
