"""``slipway bench``: load-test an OpenAI-compatible endpoint from this machine.

Neither a server nor a GPU is needed. The requests and their timings are those of the load test
that a job runs: ``runners/shared/load_generator.py``.
"""

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from runners.cli.errors import CliError, ExitCode
from runners.cli.option_fields import FieldOption, Texts, give_options, read_options
from runners.cli.output import (
    OutputOption,
    bullets,
    counted,
    number,
    progress,
    seconds,
    show,
    table,
)

if TYPE_CHECKING:
    import httpx

    from runners.shared.load_generator import Repetition, RequestOutcome, Target

KEYS = ["SLIPWAY_BENCH_KEY", "OPENAI_API_KEY"]
REQUESTS_PER_CLIENT, REQUESTS_OF_A_RATE = 10, 100  # without --num-requests and --duration
MOST_FAILURES = 32  # in a row, and two for each client: the endpoint is gone
MODELS_SECONDS, TIMEOUT_SECONDS = 10.0, 600.0
SHOWN_MODELS = 20
PERCENTILES = (50, 90, 95, 99)
# Words that are one token each, with the blank before them, in the usual vocabularies.
COMMON_WORDS = (
    "the of and to in is for that with on as are be this from by at it an or not was can have has "
    "will more one all but they their about if time which up out new when our who other what you "
    "we people some into only your over like them make first way know day work year world life"
)
NO_USAGE = (
    "the endpoint reports no usage: a word counts as an input token, a chunk as an output token"
)


class Load(BaseModel):
    """What is sent: the lengths, the arrivals and when they end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_tokens: PositiveInt = Field(default=1024, description="Tokens of a prompt")
    output_tokens: PositiveInt = Field(default=256, description="Tokens of an answer")
    num_requests: PositiveInt | None = Field(
        default=None,
        description="How many; without it and --duration 10 for each concurrent one, 100 at a "
        "rate",
    )
    concurrency: int = Field(
        default=16, ge=1, le=1024, description="Requests in flight, in a closed loop"
    )
    request_rate_per_second: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        description="Requests per second at random instants, in an open loop",
    )
    duration_seconds: PositiveFloat | None = Field(
        default=None, description="Send no more after this, such as 60s"
    )
    ttft_p95_seconds: PositiveFloat | None = Field(
        default=None, description="Target of TTFT at p95; gives goodput"
    )
    tpot_p95_seconds: PositiveFloat | None = Field(
        default=None, description="Target of TPOT at p95; gives goodput"
    )
    timeout_seconds: PositiveFloat | None = Field(
        default=None, description="Of one request; 10min without it"
    )
    seed: int = 0

    @property
    def clients(self) -> int | None:
        """Return the clients of a closed loop."""
        return None if self.request_rate_per_second else self.concurrency

    @property
    def most_requests(self) -> int | None:
        """Return how many requests are sent, None for as many as there is time."""
        usual = REQUESTS_PER_CLIENT * self.clients if self.clients else REQUESTS_OF_A_RATE
        return self.num_requests or (None if self.duration_seconds else usual)

    @property
    def targets(self) -> dict[str, float]:
        """Return the targets at p95 in seconds, of ttft and tpot."""
        both = {"ttft": self.ttft_p95_seconds, "tpot": self.tpot_p95_seconds}
        return {name: limit for name, limit in both.items() if limit}


OPTIONS = (
    FieldOption(("--input-tokens",), "input_tokens"),
    FieldOption(("--output-tokens",), "output_tokens"),
    FieldOption(("--num-requests",), "num_requests"),
    FieldOption(("--concurrency",), "concurrency"),
    FieldOption(("--request-rate",), "request_rate_per_second"),
    FieldOption(("--duration",), "duration_seconds"),
    FieldOption(("--ttft-p95",), "ttft_p95_seconds"),
    FieldOption(("--tpot-p95",), "tpot_p95_seconds"),
    FieldOption(("--timeout",), "timeout_seconds"),
)


def bench(
    endpoint: Annotated[
        str,
        typer.Argument(metavar="ENDPOINT", help="Its base URL, such as http://localhost:8000/v1."),
    ],
    *,
    model: Annotated[
        str, typer.Option("--model", help="Its model; needed if it serves several.")
    ] = "",
    endpoint_type: Annotated[
        Literal["completions", "chat"],
        typer.Option("--endpoint-type", help="/completions or /chat/completions."),
    ] = "completions",
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key", envvar=KEYS, show_default=False, help="Its key; never shown or kept."
        ),
    ] = "",
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for all output tokens; some endpoints refuse the field.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0,
    output: OutputOption = "table",
    **texts: str | None,
) -> None:
    """Load-test an OpenAI-compatible endpoint: latencies, throughput, goodput and errors.

    Ctrl-C prints what was measured so far.
    """
    from runners.shared.load_generator import Repetition, Target

    load = _load(texts, seed)
    url, key = _base_url(endpoint), _header_value(api_key)
    target = Target(
        url,
        _model_of(url, key, model),
        load.output_tokens,
        load.timeout_seconds or TIMEOUT_SECONDS,
        key,
        endpoint_type == "chat",
        ignore_eos,
    )
    run, notes = Repetition(0.0), list[str]()
    is_interrupted = _measure(target, load, run, notes)
    if not run.answered:
        if is_interrupted:
            typer.echo("Interrupted before the first answer: nothing was measured.", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED)
        raise CliError(
            f"no request was due within --duration {texts['duration']} at --request-rate "
            f"{texts['request_rate']}: raise one of them",
            field="--duration",
        )
    report = report_of(target, load, run, notes, is_interrupted=is_interrupted)
    if output == "table":
        _print_report(report)
    else:
        from runners.cli.server import write_reply

        write_reply(report, output)
    if is_interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if not report["completed"]:
        raise CliError(
            f"{url} answered none of {counted(report['requests'], 'request')}: "
            f"{run.answered[0].error}",
            code="no_answer",
            exit_code=ExitCode.FAILED,
        )


give_options(bench, {each: Load.model_fields[each.field] for each in OPTIONS})


# What the options say.


def _load(texts: Texts, seed: int) -> Load:
    """Return the load that options state.

    Raises:
        CliError: a text cannot be read or is beyond its limit, or both arrivals are given.
    """
    if None not in {texts["concurrency"], texts["request_rate"]}:
        raise CliError(
            "--concurrency and --request-rate exclude each other: requests come when one is "
            "answered (closed loop), or at a rate (open loop); leave one out",
            field="--request-rate",
        )
    return Load(**read_options(Load, OPTIONS, texts), seed=seed)


def _base_url(endpoint: str) -> str:
    """Return the endpoint's base URL; ``/v1`` is added to a bare address.

    Raises:
        CliError: it is no address.
    """
    from runners.client.transport import server_url

    try:
        url = server_url(endpoint if "://" in endpoint else f"http://{endpoint}")
    except ValueError:
        raise CliError(
            f"ENDPOINT is {endpoint!r}: it must be an address such as http://localhost:8000/v1",
            field="ENDPOINT",
        ) from None
    for ending in ("/chat/completions", "/completions"):
        url = url.removesuffix(ending)
    return url if url.count("/") > 2 else f"{url}/v1"  # noqa: PLR2004 (those of http://)


def _header_value(api_key: str) -> str:
    """Return a key that can stand in a header.

    Raises:
        CliError: it cannot.
    """
    key = api_key.strip()
    if not key.isascii() or any(not character.isprintable() for character in key):
        raise CliError(
            f"the API key has {len(key)} characters and some cannot be sent: copy it again",
            field="--api-key",
        )
    return key


def _model_of(url: str, key: str, model: str) -> str:
    """Return the model to ask for: the given one, or the only one that the endpoint lists.

    Raises:
        CliError: the endpoint does not answer, refuses the key, has not this model, or several.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/models", headers=headers, timeout=MODELS_SECONDS)
    except httpx.HTTPError as error:
        raise _unreachable(url, str(error) or type(error).__name__) from error
    if response.status_code in {401, 403}:
        raise _denied(url, f"HTTP {response.status_code}", has_key=bool(key))
    names = _listed_models(response)
    if model:
        if names is not None and model not in names:
            raise CliError(
                f"--model is {model!r}: {url}/models lists {_shown(names)}",
                code="unknown_model",
                field="--model",
            )
        return model
    if names is None or len(names) != 1:
        why = (
            f"{url} does not list its models (HTTP {response.status_code})"
            if names is None
            else f"{url}/models lists {_shown(names)}"
        )
        raise CliError(f"--model is missing: {why}", code="unknown_model", field="--model")
    return names[0]


def _listed_models(response: "httpx.Response") -> list[str] | None:
    """Return the ids of a list of models in OpenAI's form, or None."""
    from runners.shared.log_text import plain

    try:
        return [plain(str(each["id"])) for each in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return None


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN_MODELS
    listed = ", ".join(names[:SHOWN_MODELS]) or "no model"
    return f"{listed} and {rest} more" if rest > 0 else listed


def _unreachable(url: str, why: str) -> CliError:
    return CliError(
        f"{url} does not answer ({why}): check the address, and that the endpoint runs",
        code="unreachable",
        exit_code=ExitCode.FAILED,
        field="ENDPOINT",
    )


def _denied(url: str, kind: str, *, has_key: bool) -> CliError:
    what = "refuses the API key" if has_key else "needs an API key"
    return CliError(
        f"{url} {what} ({kind}): set {' or '.join(KEYS)}, or give --api-key",
        code="denied",
        exit_code=ExitCode.DENIED,
        field="--api-key",
    )


# What is sent.


def _measure(target: "Target", load: Load, run: "Repetition", notes: list[str]) -> bool:
    """Send the requests, and record them in ``run``; return whether Ctrl-C ended it."""
    import asyncio

    try:
        with progress("Sending requests"):
            asyncio.run(_send_all(target, load, run, notes))
    except KeyboardInterrupt:
        run.ended = time.monotonic()
        return True
    return False


async def _send_all(target: "Target", load: Load, run: "Repetition", notes: list[str]) -> None:
    from runners.jobspec.compress import ClosedLoop, OpenLoop
    from runners.shared.load_generator import new_client, repetition, send_request

    arrivals: ClosedLoop | OpenLoop
    if load.request_rate_per_second is not None:
        arrivals = OpenLoop(request_rate_per_second=(load.request_rate_per_second,))
    else:
        arrivals = ClosedLoop(concurrency=(load.concurrency,))
    most_failures = max(MOST_FAILURES, 2 * (load.clients or 1))
    failures = 0
    async with new_client(trust_env=True) as client:
        num_words = await _words_per_prompt(client, target, load, notes)
        prompts = itertools.islice(_prompts(load.seed, num_words), load.most_requests)
        run.began = time.monotonic()
        end = run.began + (load.duration_seconds or float("inf"))

        async def send(prompt: Any, due: float) -> "RequestOutcome":  # noqa: ANN401 (text)
            nonlocal failures
            outcome = await send_request(client, target, prompt, due)
            run.answered.append(outcome)
            failures = failures + 1 if outcome.error else 0
            return outcome

        def is_going_on() -> bool:
            return time.monotonic() < end and failures < most_failures

        result = await repetition(
            arrivals, arrivals.points[0], prompts, send, is_going_on, str(load.seed)
        )
        run.lags, run.ended = result.lags, result.ended
        if failures >= most_failures:
            notes.append(f"stopped after {failures} failures in a row")


def _prompts(seed: int | str, num_words: int) -> Iterator[str]:
    """Yield different prompts of random words, the same ones for the same seed."""
    words = COMMON_WORDS.split()
    source = random.Random(seed)  # noqa: S311 - the same prompts again, no secret
    while True:
        yield " ".join(source.choices(words, k=num_words))


async def _words_per_prompt(
    client: "httpx.AsyncClient", target: "Target", load: Load, notes: list[str]
) -> int:
    """Return the number of words whose prompt has the input tokens, by two requests.

    A vocabulary that is not usual, a chat template and a token at the beginning change the number
    of tokens; the endpoint's usage says how. Both requests also warm the endpoint up.

    Raises:
        CliError: the endpoint refuses the request.
    """
    wanted = load.input_tokens
    prompts = _prompts(f"warm-up {load.seed}", wanted)
    tokens = await _warm_up(client, target, next(prompts))
    if not tokens:
        notes.append(NO_USAGE)
        return wanted
    num_words = max(1, wanted // 2)
    fewer = await _warm_up(client, target, " ".join(next(prompts).split()[:num_words]))
    if tokens == wanted or tokens <= fewer:
        return wanted
    per_word = (tokens - fewer) / (wanted - num_words)
    return max(1, round(wanted - (tokens - wanted) / per_word))


async def _warm_up(client: "httpx.AsyncClient", target: "Target", prompt: str) -> int:
    """Return the input tokens of a request for one token."""
    from runners.shared.load_generator import send_request

    one = replace(target, output_tokens=1)
    outcome = await send_request(client, one, prompt, time.monotonic())
    if not outcome.error or outcome.input_tokens:  # one token may have no text
        return outcome.input_tokens
    kind, url = outcome.error_kind, target.url
    if kind in {"HTTP 401", "HTTP 403"}:
        raise _denied(url, kind, has_key=bool(target.key))
    if kind.endswith("Error"):  # of the connection
        raise _unreachable(url, outcome.error)
    way_out = ""
    if kind in {"HTTP 404", "HTTP 405"}:
        other = "completions" if target.is_chat else "chat"
        way_out = f"; try --endpoint-type {other}"
    elif "context_length_exceeded" in outcome.error:
        way_out = "; give fewer --input-tokens or --output-tokens"
    elif kind in {"HTTP 400", "HTTP 422"} and target.ignores_eos:
        way_out = "; if it refuses ignore_eos, add --no-ignore-eos"
    elif kind == "timeout":
        way_out = "; allow more by --timeout"
    raise CliError(
        f"the first request of {counted(len(prompt.split()), 'word')} failed: "
        f"{outcome.error}{way_out}",
        code="refused",
        exit_code=ExitCode.FAILED,
    )


# What was measured.

FIGURES = {  # name of the report: of the outcome, in the table
    "ttft_seconds": ("ttft", "TTFT"),
    "tpot_seconds": ("tpot", "TPOT"),
    "itl_seconds": ("itl", "ITL"),
    "latency_seconds": ("latency", "E2E latency"),
}


def report_of(
    target: "Target",
    load: Load,
    run: "Repetition",
    notes: Sequence[str],
    *,
    is_interrupted: bool = False,
) -> dict[str, Any]:
    """Return what was measured; latencies and counts are of complete answers alone."""
    complete = [each for each in run.answered if not each.error]
    elapsed = max(run.seconds, 1e-9)
    total_input = sum(each.input_tokens for each in complete)
    total_output = sum(each.output_tokens for each in complete)
    rates = {
        "requests_per_second": len(complete) / elapsed,
        "output_tokens_per_second": total_output / elapsed,
        "total_tokens_per_second": (total_input + total_output) / elapsed,
    }
    report: dict[str, Any] = {
        "endpoint": target.url,
        "model": target.model,
        "endpoint_type": "chat" if target.is_chat else "completions",
        "concurrency": load.clients,
        "request_rate_per_second": load.request_rate_per_second,
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "seed": load.seed,
        "is_interrupted": is_interrupted,
        "duration_seconds": run.seconds,
        "requests": len(run.answered),
        "completed": len(complete),
        "failed": len(run.answered) - len(complete),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        **rates,
    }
    for name, (own, _) in FIGURES.items():
        report[name] = _distribution(_values(complete, own))
    report["goodput"] = _goodput(load.targets, complete, report, elapsed)
    report["errors"] = _errors(run.answered)
    report["notes"] = [*notes, *_caveats(load, run, report)]
    return report


def _values(complete: "Sequence[RequestOutcome]", name: str) -> list[float]:
    from runners.shared.load_generator import values_of

    if name == "itl":
        return sorted(itertools.chain.from_iterable(each.itl_seconds for each in complete))
    return values_of(complete, name)


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return the mean and percentiles of ascending values, or None without a value."""
    from runners.shared.load_generator import percentile

    if not values:
        return None
    percentiles = {f"p{each}": percentile(values, each) for each in PERCENTILES}
    return {"mean": statistics.fmean(values), **percentiles}


def _goodput(
    targets: dict[str, float],
    complete: "Sequence[RequestOutcome]",
    report: dict[str, Any],
    elapsed: float,
) -> dict[str, Any] | None:
    """Return the rate of the requests within every target, and whether each holds at p95.

    Source: the request goodput of ``vllm bench serve --goodput``, after Zhong et al. 2024
    (DistServe), arXiv:2401.09670.
    """
    if not targets:
        return None
    good = sum(
        all((getattr(each, f"{name}_seconds") or 0.0) <= limit for name, limit in targets.items())
        for each in complete
    )
    held = {}
    for name, limit in targets.items():
        figures = report[f"{name}_seconds"]
        measured = figures["p95"] if figures else None
        held[f"{name}_p95_seconds"] = {
            "target": limit,
            "measured": measured,
            "is_met": measured is not None and measured <= limit,
        }
    return {
        "requests_per_second": good / elapsed,
        "share": good / report["requests"],
        "targets": held,
    }


def _errors(answered: "Sequence[RequestOutcome]") -> dict[str, dict[str, Any]]:
    """Return the number of failures of each kind, the commonest first, with one as example."""
    kinds = Counter(each.error_kind for each in answered if each.error)
    examples = {each.error_kind: each.error for each in answered if each.error}
    return {
        kind: {"count": times, "example": examples[kind]} for kind, times in kinds.most_common()
    }


def _caveats(load: Load, run: "Repetition", report: dict[str, Any]) -> Iterator[str]:
    from runners.shared.load_generator import (
        generator_lag_warnings,
        overload_warnings,
        sample_size_warnings,
        short_answer_warnings,
    )

    if report["failed"]:
        yield f"{report['failed']} of {report['requests']} requests failed, and no figure has them"
    ttft = report["ttft_seconds"]
    if ttft is None:
        return
    yield from sample_size_warnings(run.answered)
    yield from generator_lag_warnings([run], ttft["mean"])
    yield from short_answer_warnings(run.answered, load.output_tokens)
    if load.request_rate_per_second is not None:
        yield from overload_warnings(report["requests_per_second"], load.request_rate_per_second)


def _print_report(report: dict[str, Any]) -> None:
    load = (
        f"at {number(report['request_rate_per_second'])} requests a second"
        if report["request_rate_per_second"]
        else f"{report['concurrency']} concurrent"
    )
    typer.echo(
        f"{report['model']} at {report['endpoint']}: {counted(report['requests'], 'request')} of "
        f"{report['input_tokens']:,} + {report['output_tokens']:,} tokens, {load}, in "
        f"{seconds(report['duration_seconds'])}"
        + (" (interrupted)" if report["is_interrupted"] else "")
    )
    typer.echo()
    rows = [
        (title, *(seconds(value) for value in report[name].values()))
        for name, (_, title) in FIGURES.items()
        if report[name]
    ]
    columns = ("Latency", "Mean", *(f"p{each}" for each in PERCENTILES))
    if rows:
        show(table(columns, rows, right=range(1, len(columns))))
        typer.echo()
    throughput = [
        ("Output tokens/s", number(report["output_tokens_per_second"])),
        ("Total tokens/s", number(report["total_tokens_per_second"])),
        ("Requests/s", number(report["requests_per_second"])),
    ]
    goodput = report["goodput"]
    if goodput:
        throughput.append(("Goodput requests/s", number(goodput["requests_per_second"])))
    completed = report["completed"]
    throughput += [
        ("Input tokens", f"{report['total_input_tokens']:,}"),
        ("Output tokens", f"{report['total_output_tokens']:,}"),
        ("Answered", f"{completed:,} of {report['requests']:,}"),
    ]
    show(table(("Throughput", ""), throughput, right=(1,)))
    for name, held in (goodput or {}).get("targets", {}).items():
        title = name.removesuffix("_p95_seconds").upper()
        measured = "not measured" if held["measured"] is None else seconds(held["measured"])
        state = "met" if held["is_met"] else "missed"
        typer.echo(f"{title} p95 {measured}, target {seconds(held['target'])}: {state}")
    if report["errors"]:
        typer.echo()
        errors = [
            (kind, str(each["count"]), each["example"]) for kind, each in report["errors"].items()
        ]
        show(table(("Error", "Count", "Example"), errors, right=(1,)))
    if report["notes"]:
        typer.echo()
        show(bullets(report["notes"]))
