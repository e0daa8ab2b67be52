"""Benchmark of the planner's layout choice on four local ranks, with its docs page."""

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from planner.api import estimate, plan
from planner.calibration import calibrate_host, measurements_of
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import EstimateRequest, HostCalibration, PlanRequest
from planner.specs.workload import Strategy
from runners.host.bench import CollectiveTime, LayoutBenchRequest, Ratio, StepTime, StoredRatio
from runners.host.inventory import host_facts
from runners.jobspec.train import LayoutOptions
from runners.plans.training_layout import layout_of
from runners.shared.facts import Microbench
from webapp.bench import site
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host

# Two small training runs, and every parallel layout of the trainer on four ranks.


RANKS = 4
ALONE, COPIES = "one process", "4 copies"
Sizes = dict[str, Any]
BATCH = 8  # sequences per step, each its own micro-batch
CHUNKS = 2  # virtual pipeline chunks per stage, for the interleaved schedule
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """One model and its sequence length."""

    name: str
    words: str
    config: dict[str, Any]
    sequence_length: int

    @property
    def training(self) -> dict[str, Any]:
        """Return the job spec fields that are equal for all layouts."""
        return {
            "sequence_length": self.sequence_length,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": BATCH,
            "max_steps": 1000,
            "time_budget_seconds": None,
            "compute_dtype": "fp32",
        }

    def pinned(self, **sizes: object) -> Strategy:
        """Return a strategy with the fields that all layouts here share."""
        common = {
            "micro_batch_size": 1,
            "weight_dtype": "fp32",
            "compute_dtype": "fp32",
            "activation_recomputation": "none",
            "attention": "eager",
        }
        return Strategy.model_validate({**common, **sizes})

    def request(
        self, cluster: ClusterSpec, strategy: Strategy, calibration: HostCalibration | None = None
    ) -> dict[str, Any]:
        """Return the planner request for this training run."""
        return {
            "model": self.config,
            "cluster": cluster,
            "workload": {
                "kind": "train",
                "sequence_length": self.sequence_length,
                "global_batch_size": BATCH,
            },
            "engine": "torch",
            "strategy": strategy,
            "host_calibration": calibration,
        }


MODELS = (
    Case(
        "wide",
        "512 wide, 4 layers, sequences of 32 tokens: many weights for few tokens",
        {**LLAMA, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 8},
        32,
    ),
    Case(
        "deep",
        "192 wide, 8 layers, sequences of 128 tokens: few weights for many tokens",
        {**LLAMA, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4},
        128,
    ),
)  # fmt: skip


def cases(case: Case) -> dict[str, Strategy]:
    """Return every layout of four ranks that runs, by name: each dimension alone, and pairs."""
    layers = case.config["num_hidden_layers"]
    named = [*_copies(), *_tensor(), *_context(), *_pipelines(layers)]
    return {name: case.pinned(**sizes) for name, sizes in named}


def _zero(copies: int, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Iterator[tuple[str, Sizes]]:
    for stage in stages:
        words = f", ZeRO-{stage}" if stage else ""
        yield f"{copies} copies{words}", {"data_parallel_size": copies, "zero_stage": stage}


def _copies() -> Iterator[tuple[str, Sizes]]:
    yield from _zero(RANKS)
    for name, sizes in _zero(RANKS, (1, 2, 3)):
        yield f"{name}, in pairs", {**sizes, "zero_shard_size": 2}


def _tensor() -> Iterator[tuple[str, Sizes]]:
    for words, sequence in (("", False), (" and sequence", True)):
        tensor = {"tensor_parallel_size": 2, "sequence_parallel": sequence}
        yield f"tensor{words} 4", {**tensor, "tensor_parallel_size": RANKS}
        for name, sizes in _zero(2):
            yield f"{name} x tensor{words} 2", {**sizes, **tensor}


def _context() -> Iterator[tuple[str, Sizes]]:
    context = {"context_parallel_size": 2}
    for method in ("gathered", "ring"):
        yield f"context 4, {method}", {"context_parallel_size": RANKS}
    for name, sizes in _zero(2):
        yield f"{name} x context 2", {**sizes, **context}
    yield "tensor 2 x context 2", {"tensor_parallel_size": 2, **context}


def _pipelines(layers: int) -> Iterator[tuple[str, Sizes]]:
    with_others = {
        **dict(_zero(2, (0, 1, 3))),
        "tensor 2": {"tensor_parallel_size": 2},
        "tensor and sequence 2": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "context 2": {"context_parallel_size": 2},
    }
    for schedule, chunks in _schedules():
        own = {"pipeline_schedule": schedule, "virtual_pipeline_size": chunks}
        if layers >= RANKS * chunks:
            yield f"pipeline 4, {schedule}", {"pipeline_parallel_size": RANKS, **own}
        for name, sizes in with_others.items():
            whole = {**sizes, "pipeline_parallel_size": 2, **own}
            yield f"{name} x pipeline 2, {schedule}", whole


def _schedules() -> Iterator[tuple[str, int]]:
    yield from product(("gpipe", "1f1b", "zero_bubble"), (1,))
    yield "interleaved", CHUNKS


ROUNDS = 12
FINAL_ROUNDS = 80  # of the first choice and the fastest other layout
CALIBRATION_ROUNDS = 2


class Machine(NamedTuple):
    """This machine as a planner cluster: one process, and ranks that share its cores."""

    alone: ClusterSpec
    ranks: ClusterSpec


class LayoutComparison(NamedTuple):
    """Predicted and measured step times of one model's layouts."""

    model: str
    first: str
    predicted: Mapping[str, float]
    seconds: Mapping[str, list[float]]
    regret: Ratio  # step time of the fastest other layout / of the first choice
    factors: Mapping[str, float]

    def step_seconds_of(self, name: str) -> float:
        """Return a layout's step seconds: the geometric mean of its rounds."""
        return statistics.geometric_mean(self.seconds[name])


def layout_comparisons(rounds: int = ROUNDS) -> Iterator[LayoutComparison]:
    """Yield the predicted and measured step times of each model's layouts."""
    bench = Microbench.model_validate_json(_output_of("runners.jobs.bench.device_rates", "")[-1])
    for case in MODELS:
        yield compare_layouts(case, bench, cases(case), rounds)


def compare_layouts(
    case: Case, bench: Microbench, layouts: Mapping[str, Strategy], rounds: int
) -> LayoutComparison:
    """Return the results of one model; the planner predicts before the layouts run."""
    calibration_layouts = {ALONE: None, COPIES: layout_of(layouts[COPIES])}
    lines = list(_runs(case, calibration_layouts, CALIBRATION_ROUNDS))
    machine = machine_of(bench, [each for each in lines if isinstance(each, CollectiveTime)])
    calibration = calibration_of(case, machine, _by_layout(lines))
    chosen = first_choice(case, machine, calibration)
    options = {name: _options(name, each) for name, each in layouts.items()}
    first = next((name for name, each in options.items() if each == layout_of(chosen)), "")
    if not first:
        first = "planner's own"
        layouts, options = {**layouts, first: chosen}, {**options, first: layout_of(chosen)}
    predicted = {
        name: predicted_seconds(case, machine.ranks, each, calibration)
        for name, each in layouts.items()
    }
    lines = list(_runs(case, options, rounds, first))
    ratio = next(each for each in lines if isinstance(each, Ratio))
    factors = {str(name): each.factor for name, each in calibration.factors.items()}
    return LayoutComparison(case.name, first, predicted, _by_layout(lines), ratio, factors)


def machine_of(bench: Microbench, exchanges: list[CollectiveTime]) -> Machine:
    """Return this machine as a host would report it, with its measured collectives."""
    host = Host(
        name="this machine",
        slug="this-machine",
        facts=host_facts(Path.cwd()).model_dump(mode="json"),
        microbench=bench.model_dump(mode="json"),
    )
    alone = cluster_for_host(host)
    by_name = {each.collective: each for each in exchanges}
    fields = {
        "intra_node_bandwidth_bytes_per_second": by_name["all_reduce"].bytes_per_second,
        "collective_latency_seconds": by_name["all_reduce"].latency_seconds,
        "hand_over_latency_seconds": by_name["send"].latency_seconds,
    }
    ranks = alone.as_ranks_of_cpu(RANKS, bench.num_threads)
    return Machine(alone, ranks.model_copy(update=fields))


def calibration_of(
    case: Case, machine: Machine, step_seconds: Mapping[str, list[float]]
) -> HostCalibration:
    """Return the host's calibration after a run on one process and a run with plain DDP."""
    requests = {
        ALONE: case.request(machine.alone, case.pinned(data_parallel_size=1)),
        COPIES: case.request(machine.ranks, case.pinned(data_parallel_size=RANKS)),
    }
    rows = [
        row
        for name, request in requests.items()
        for row in measurements_of(
            EstimateRequest.model_validate(request),
            {"step_seconds": statistics.median(step_seconds[name])},
            host="this-machine",
            job=name,
        )
    ]
    return calibrate_host(rows)


def first_choice(case: Case, machine: Machine, calibration: HostCalibration) -> Strategy:
    """Return the strategy that the planner would launch."""
    request = case.request(machine.ranks, case.pinned(), calibration)
    pins = request.pop("strategy")
    answer = plan(PlanRequest.model_validate({**request, "pins": pins, "objective": "latency"}))
    return answer.plans[0].strategy


def predicted_seconds(
    case: Case, cluster: ClusterSpec, strategy: Strategy, calibration: HostCalibration
) -> float:
    """Return the step seconds that the planner predicts for a strategy."""
    estimate_request = EstimateRequest.model_validate(case.request(cluster, strategy, calibration))
    seconds = estimate(estimate_request).performance.step_seconds
    if seconds is None:
        raise ValueError(f"the planner predicts no step time for {strategy}")
    return seconds


def _options(name: str, strategy: Strategy) -> LayoutOptions | None:
    """Return a layout's options; the planner has one strategy for both context methods."""
    options = layout_of(strategy)
    if options is not None and name.endswith("ring"):
        return options.model_copy(update={"context_method": "ring"})
    return options or LayoutOptions(data_parallel_size=RANKS)


def _runs(
    case: Case, layouts: Mapping[str, LayoutOptions | None], rounds: int, first: str | None = None
) -> Iterator[CollectiveTime | StepTime | Ratio]:
    """Yield the output rows of the layout benchmark, run in a process with torch."""
    request = LayoutBenchRequest(
        config=case.config,
        training=case.training,
        layouts=layouts,
        ranks=RANKS,
        rounds=rounds,
        final_rounds=FINAL_ROUNDS if first else 0,
        first_choice=first,
    )
    for line in _output_of("runners.jobs.bench.layouts_bench", request.model_dump_json()):
        row: Any = json.loads(line)
        if isinstance(row, list):
            yield Ratio(*row)
        else:
            kind = CollectiveTime if "collective" in row else StepTime
            yield kind.model_validate(row)


def _output_of(module: str, stdin: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", module]
    ended = subprocess.run(
        command,
        cwd=site.ROOT,
        env=site.without_gpus(),
        input=stdin,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=True,
    )
    return ended.stdout.splitlines()


def _by_layout(lines: list[CollectiveTime | StepTime | Ratio]) -> dict[str, list[float]]:
    times = defaultdict[str, list[float]](list)
    for each in lines:
        if isinstance(each, StepTime):
            times[each.layout].append(each.seconds)
    return dict(times)


# Predicted and measured step times of layouts: stored rows, ratios and docs page.


RESULTS_PATH = Path(__file__).parent / "data" / "layouts.jsonl"
DOCS = Path(__file__).parents[2] / "templates" / "docs" / "layout-times.md"
COMMAND = "manage.py bench layouts --keep"
GOAL = 0.95  # of the fastest layout's speed: a regret of at most 5 %
StoredResult = Mapping[str, Any]


def regrets(found: Sequence[LayoutComparison]) -> Iterator[Ratio]:
    """Yield, per model, the fastest other layout's step time / the first choice's."""
    for each in found:
        yield each.regret._replace(
            name=f"fastest other layout / planner's first choice, {each.model} model"
        )


def keep(found: Sequence[LayoutComparison], load: float) -> None:
    """Replace the stored rows and the docs page."""
    lines = []
    for each in found:
        regret = StoredRatio.measured_now(each.regret, COMMAND, load).model_dump(mode="json")
        lines.append(json.dumps({**each._asdict(), "regret": regret}))
    RESULTS_PATH.write_text("".join(f"{line}\n" for line in lines))
    DOCS.write_text(page(stored_results()))


def stored_results() -> list[StoredResult]:
    """Return the stored results, one per model."""
    return [json.loads(line) for line in RESULTS_PATH.read_text().splitlines()]


def page(results: Sequence[StoredResult]) -> str:
    """Return the docs page with the rows."""
    regret = results[0]["regret"]
    versions = ", ".join(f"{name} {value}" for name, value in regret["versions"].items())
    return PAGE.format(
        rounds=max(len(seconds) for seconds in results[0]["seconds"].values()) - regret["n"],
        finals=regret["n"],
        taken=f"{regret['date']}, {regret['machine']}; {versions}",
        verdicts="\n".join(_verdict(each) for each in results),
        tables="\n".join(_section(each) for each in results),
    )


def _verdict(row: StoredResult) -> str:
    regret = row["regret"]
    lost, low, high = (100 * max(0.0, 1 / regret[name] - 1) for name in ("value", "high", "low"))
    cells = (
        row["model"],
        row["first"],
        regret["name"],
        f"{lost:.1f} % ({low:.1f} to {high:.1f})",
        regret["n"],
        "yes" if regret["low"] > GOAL else "no" if regret["value"] <= GOAL else "not certain",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _section(row: StoredResult) -> str:
    case = next(each for each in MODELS if each.name == row["model"])
    measured = {
        name: statistics.geometric_mean(seconds) for name, seconds in row["seconds"].items()
    }
    lines = [
        f"| {name} | {row['predicted'][name]:.2f} | {measured[name]:.2f} "
        f"| {min(seconds):.2f} to {max(seconds):.2f} | {len(seconds)} |"
        for name, seconds in sorted(row["seconds"].items(), key=lambda each: measured[each[0]])
    ]
    words = f"{case.words[0].upper()}{case.words[1:]}."
    factors = ", ".join(f"{name} {value:.2f}" for name, value in row["factors"].items())
    head = "| Layout | Predicted, s | Measured, s | Span, s | Rounds |\n|---|---|---|---|---|"
    title = f"## {case.name.capitalize()} model"
    note = f"The host's calibration factors after its two runs: {factors}."
    return "\n".join((title, "", words, note, "", head, *lines, ""))


PAGE = """\
# Step times of all layouts, predicted and measured

This page shows how well the planner ranks training layouts. `manage.py bench layouts` runs two
small trainings in every layout that the trainer supports on four ranks of this machine, and gets
the planner's predictions first. The planner has the data that it would have of any host: its
micro-benchmark, the time of an all-reduce and of a message between the ranks, and two finished
runs (one process; four data parallel copies), which give the host's calibration factors. Each
round runs all layouts one after another, every other round in reverse order, each layout in new
processes. Slow layouts are left out of later rounds. There were {rounds} such rounds, then
{finals} rounds of only the planner's first choice and its fastest competitor. Measured on
{taken}.

The ranks share two cores. So no communication overlaps with computation, a waiting rank frees its
core for another, and each collective waits until every rank has run. The planner counts all three
effects if ranks share a CPU.

| Model | Planner's first choice | Fastest other layout | Regret (95 %) | n | At most 5 % |
|---|---|---|---|---|---|
{verdicts}

*Regret* is how much longer a step of the planner's first choice takes than a step of the fastest
other layout; it is zero if the first choice is faster. The rounds of all layouts select the
fastest other one. The figure and its interval come from the pairs of the {finals} rounds after
them, so that one fast round does not bias it. *Not certain* means that the figure is within 5 %,
but other work on the machine moved the rounds by more.

Compare seconds only within a table. Predictions of tensor parallel layouts are too short: torch's
DTensor has more overhead per operator than the planner counts, in addition to communication.
Predictions of context parallel layouts are too long: the planner assumes a ring, and one
all-gather starts fewer messages. Both are far behind the first choice in either column.

{tables}"""
