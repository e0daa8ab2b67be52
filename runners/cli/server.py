"""The server that commands talk to: its address and token, and its refusals as errors."""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from runners.cli.config import load_config
from runners.cli.errors import CliError, ExitCode
from runners.cli.output import write_document

if TYPE_CHECKING:
    from pydantic import BaseModel

    from runners.client.generated import Slipway
    from runners.client.transport import ApiError

LOGIN = "log in with `slipway login SERVER`, or set SLIPWAY_SERVER and SLIPWAY_TOKEN"
DENIED, MISSING, CONFLICT = {401, 403}, 404, 409
OVER_BUDGET = "over_budget"  # code of a launch that the token's budget does not suffice for
MOST_NAMESAKES, MOST_LISTED = 200, 10  # jobs that are searched for a name, and that errors list
Row = TypeVar("Row")
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


# Completion: names of the server, if it answers soon.

COMPLETION_SECONDS = 1.2
MOST_COMPLETED = 100
Completions = list[tuple[str, str]]  # a word and what it stands for, which zsh and fish show
# Others chose the names: nothing that means something to a shell gets onto a command line.
SAFE_WORD, UNSAFE = re.compile(r"[\w.+-]+"), re.compile(r"[^\w .+-]")


def _completed(read: "Callable[[Slipway], Completions]", incomplete: str) -> Completions:
    """Return the words that a text begins, as they are read from the configured server.

    Without a login, on any error and after ``COMPLETION_SECONDS`` there are none.
    """
    found: Completions = []

    def run() -> None:
        with contextlib.suppress(Exception):
            config = load_config()
            if not config.server or not config.token:
                return
            from runners.client.generated import Slipway

            with Slipway(config.server, config.token) as client:
                found.extend(read(client))

    # The client repeats a failed request after some seconds; a shell that waits is not told why.
    reader = threading.Thread(target=run, daemon=True)
    reader.start()
    reader.join(COMPLETION_SECONDS)
    return [
        (word, UNSAFE.sub(" ", meaning))
        for word, meaning in list(found)
        if word.startswith(incomplete) and SAFE_WORD.fullmatch(word)
    ]


def complete_job(incomplete: str) -> Completions:
    """Return the newest jobs that a text begins: their ids, and names that need no quotes."""

    def read(client: "Slipway") -> Completions:
        jobs = client.list_jobs(limit=MOST_COMPLETED).items
        return [(job.id, job.name) for job in jobs] + [(job.name, job.id) for job in jobs]

    return _completed(read, incomplete)


def complete_host(incomplete: str) -> Completions:
    """Return the hosts whose slug a text begins."""
    return _completed(
        lambda client: [(host.slug, host.state) for host in client.paginate(client.list_hosts)],
        incomplete,
    )


def complete_server_plan(incomplete: str) -> Completions:
    """Return the ids of the server's last saved plans that a text begins."""
    return _completed(
        lambda client: [
            (plan.id, plan.name) for plan in client.list_plans(limit=MOST_COMPLETED).items
        ],
        incomplete,
    )


JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Id of a job, or its name.", autocompletion=complete_job),
]


@contextlib.contextmanager
def server() -> Iterator["Slipway"]:
    """Yield the client of the configured server.

    Raises:
        CliError: none is configured, it does not answer, or it refuses what the block asks for.
    """
    config = load_config()
    if not config.server or not config.token:
        missing = "server" if not config.server else "token"
        raise CliError(
            f"no {missing} is known: {LOGIN}", code="not_logged_in", exit_code=ExitCode.DENIED
        )
    from runners.client.generated import Slipway
    from runners.client.transport import ApiError, UnreachableError

    try:
        with Slipway(config.server, config.token) as client:
            yield client
    except ApiError as error:
        raise refused(error) from error
    except UnreachableError as error:
        raise CliError(str(error), code="unreachable", exit_code=ExitCode.FAILED) from error


def has_server() -> bool:
    """Return whether a server and a token are configured."""
    config = load_config()
    return bool(config.server and config.token)


def refused(error: "ApiError") -> CliError:
    """Return the error of a command for a refusal of the server."""
    if error.status in DENIED:
        way_out = "" if error.status == 403 else f" {LOGIN[0].upper()}{LOGIN[1:]}."  # noqa: PLR2004
        return CliError(
            f"{error.detail}{way_out}",
            code=error.code or "denied",
            exit_code=ExitCode.DENIED,
            problem=error.facts,
        )
    exit_code = ExitCode.USAGE if error.status in {400, 422} else ExitCode.FAILED
    if error.code == OVER_BUDGET:
        exit_code = ExitCode.DENIED
    fields = [each["field"] for each in error.errors if each.get("field")]
    lines = [f"{each['field']}: {each['message']}" for each in islice(error.errors, 1, None)]
    return CliError(
        "\n  ".join([error.detail, *lines]),
        code=error.code or f"http_{error.status}",
        exit_code=exit_code,
        field=fields[0] if fields else None,
        problem=error.facts,
    )


def job_id_of(client: "Slipway", name: str) -> str:
    """Return the id of a job: an id as it is, else that of the only job with the name.

    Raises:
        CliError: no job has the name, or several have.
    """
    if len(name) == 26 and name.isalnum():  # noqa: PLR2004 (a ULID)
        return name.upper()
    found = client.list_jobs(q=name, limit=MOST_NAMESAKES).items
    exact = [job for job in found if job.name == name]
    if len(exact) == 1:
        return exact[0].id
    listed = [
        f"{job.id}  {job.name}  {job.state}, "
        + (f"started {job.started_at:%Y-%m-%d %H:%M}Z" if job.started_at else "not started")
        for job in islice(exact or found, MOST_LISTED)
    ]
    if exact:
        count = f"{len(exact)}{' or more' if len(found) == MOST_NAMESAKES else ''}"
        raise CliError(
            "\n  ".join([f"{count} jobs are named {name!r}; name one by its id:", *listed]),
            code="ambiguous",
            field="JOB",
        )
    near = ["; names that contain it:", *listed] if listed else [""]
    raise CliError(
        f"no job is named {name!r}: `slipway ps -a` lists every job" + "\n  ".join(near),
        code="not_found",
        exit_code=ExitCode.FAILED,
        field="JOB",
    )


def row_named(rows: Iterable[Row], name: str, fields: Sequence[str], noun: str) -> Row:
    """Return the row of a list that has a name in one of its ``fields``.

    Raises:
        CliError: there is none.
    """
    for row in rows:
        if name in {getattr(row, field) for field in fields}:
            return row
    kind = noun.rsplit(maxsplit=1)[-1]
    raise CliError(
        f"there is no {noun} {name!r}; `slipway {kind}s list` shows them", field=kind.upper()
    )


def write_reply(reply: "BaseModel | list[Any] | dict[str, Any]", output: str) -> None:
    """Write a reply of the server as JSON or YAML: the API's own schema; a list as one page."""
    from pydantic import TypeAdapter

    if isinstance(reply, list):
        reply = {"items": reply, "next_cursor": None}
    write_document(TypeAdapter(Any).dump_json(reply, indent=2).decode(), output)


def wrote(reply: "BaseModel | list[Any] | dict[str, Any]", output: str) -> bool:
    """Write a reply unless a table is wanted; return whether it is written."""
    if output != "table":
        write_reply(reply, output)
    return output != "table"


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is done; without a terminal it must be allowed by ``--yes``.

    Raises:
        CliError: nobody can be asked.
        Abort: the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CliError(f"{question} Nobody can be asked here: repeat it with --yes", field="--yes")
    typer.confirm(question, abort=True)
