"""The benches: kept rows, their pages, ratios that prove a technique, peers."""

import datetime as dt
import io
import json
import math
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from django.conf import settings
from django.core.management import CommandError, call_command

from planner.catalog.devices import get_device
from planner.catalog.models import get_model
from planner.specs.cluster import ClusterSpec, DeviceSpec
from runners.host import bench
from runners.host.abilities import ABILITIES
from runners.host.bench import CASES, CollectiveTime, RankMemory, Ratio, StoredRatio
from runners.jobs.bench import offload_bench
from runners.jobspec import CompressSpec, FolderModel
from runners.jobspec.train import LayoutOptions
from runners.plans.training_layout import layout_of
from tests.webapp.boot.conftest import eventually
from webapp.agents.live_messages import messages_of
from webapp.bench import (
    compression,
    layouts,
    live_ends,
    live_path,
    long_history,
    memory,
    peers,
    site,
    supervising,
)
from webapp.bench import peer_answer as script
from webapp.bench.compression import CLAIMS, Claim, page, verdict
from webapp.bench.host_load import CommitCount, speak
from webapp.bench.layouts import (
    ALONE,
    COPIES,
    MODELS,
    RANKS,
    LayoutComparison,
    Machine,
    _options,
    calibration_of,
    cases,
    first_choice,
    machine_of,
    predicted_seconds,
)
from webapp.bench.long_history import long_history_metrics
from webapp.bench.memory import Row, predicted_bytes, rows_of, sharding_ratios
from webapp.bench.peers import OTHERS, QUESTION, UNITS, Answer
from webapp.bench.ratios import PROOFS, evidence, holds, keep, level_of, stored
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job, Measurement
from webapp.operations.management.commands import bench as command
from webapp.operations.management.commands.bench import Figure

# The table of compressions: kept rows, the page made of them, the order that they show.


PAGE = settings.BASE_DIR / "templates" / "docs" / "compression.md"


def row(perplexity, low, high):
    names = ("perplexity", "perplexity_ratio_low", "perplexity_ratio_high")
    return dict(zip(names, (perplexity, low, high), strict=True))


def test_the_page_and_every_claim_are_of_the_rows_that_were_kept(tmp_path):
    assert PAGE.read_text() == page(compression.stored())
    assert set(compression.stored()) == set(bench.SETTINGS)
    named = {name for claim in CLAIMS for name in (claim.better, claim.worse)}
    assert named <= set(bench.SETTINGS)
    for name, measured in compression.stored().items():
        assert measured["perplexity"] > 1, name
        assert measured["decode_tokens_per_second"] > 0, name
    rows = {name: dict(each) for name, each in compression.stored().items()}
    rows["gptq 3 bit"]["perplexity"] = 12345.0
    assert "12345.00" in page(rows)


def test_every_way_of_the_bench_is_one_that_a_job_takes():
    for name, chosen in bench.SETTINGS.items():
        spec = CompressSpec(model=FolderModel(path="any"), **chosen)
        assert {key: getattr(spec, key) for key in chosen} == dict(chosen), name


def test_a_claim_that_the_rows_contradict_has_its_cause_on_the_page():
    rows, text = compression.stored(), PAGE.read_text().replace("\n", " ")
    for claim in CLAIMS:
        assert (verdict(claim, rows) == "does not hold") == bool(claim.why_not), claim
        assert claim.why_not in text, claim


def test_a_claim_is_judged_by_its_intervals():
    for better, worse, words in [
        (row(10, 1.0, 1.1), row(12, 1.2, 1.3), "holds beyond both intervals"),
        (row(10, 1.0, 1.2), row(11, 1.1, 1.3), "holds, within the intervals"),
        (row(11, 1.0, 1.2), row(10, 0.9, 1.1), "not seen: too close for this text"),
        (row(12, 1.2, 1.3), row(10, 1.0, 1.1), "does not hold"),
    ]:
        assert verdict(Claim("a", "b", "source"), {"a": better, "b": worse}) == words, better
    assert verdict(Claim("gone", "lost", "source"), compression.stored()) == "not measured yet"


def test_figures_carry_their_units(monkeypatch, tmp_path):
    kept = [bench.Row("rtn", {"perplexity": 3.0, "disk_bytes": 7.0, "other": 1.0})]
    monkeypatch.setattr(compression, "rows", lambda _folder, _seconds: iter(kept))
    found = list(compression.compression_metrics(tmp_path))
    assert found == [("rtn: disk_bytes", 7.0, "bytes"), ("rtn: perplexity", 3.0, "")]
    assert json.dumps(found)


def test_rows_that_are_kept_take_the_place_of_those_before(monkeypatch, tmp_path):
    again = [bench.Row(name, dict(each)) for name, each in compression.stored().items()]
    again[1].measured["perplexity"] = 4321.0
    monkeypatch.setattr(compression, "rows", lambda _folder, _seconds: iter(again))
    monkeypatch.setattr(compression, "RESULTS_PATH", tmp_path / "rows.jsonl")
    monkeypatch.setattr(compression, "DOCS", tmp_path / "page.md")
    list(compression.compression_metrics(tmp_path, is_kept=True))
    assert compression.stored()[again[1].name]["perplexity"] == 4321.0
    assert "4321.00" in (tmp_path / "page.md").read_text()


# A technique is proven by ratios that were kept, as long as they are clear of their floor.


BOTH = [proof.ratio for proof in PROOFS["turbotransformers"]]


def kept(name, low=1.2, command="manage.py bench generate --keep"):
    return StoredRatio(
        name=name, value=low + 0.1, low=low, high=low + 0.2, n=7, of="processor seconds",
        date=dt.date(2026, 1, 2), versions={}, machine="2 cores", command=command,
    )  # fmt: skip


def test_a_technique_is_proven_by_the_ratios_that_were_kept():
    assert level_of("turbotransformers", {BOTH[0]: kept(BOTH[0])}) == "runs"
    assert level_of("turbotransformers", {name: kept(name) for name in BOTH}) == "proven"
    rows = {BOTH[0]: kept(BOTH[0]), BOTH[1]: kept(BOTH[1], low=0.98)}
    assert level_of("turbotransformers", rows) == "runs"
    assert level_of("dfx", {"anything": kept("anything")}) == "planned"
    assert "moe_offload" in ABILITIES
    assert level_of("moe_offload", {}) == "runs"
    rows = {BOTH[0]: kept(BOTH[0])}
    assert [ratio.name for _proof, ratio in evidence("turbotransformers", rows)] == [BOTH[0]]


def test_a_floor_below_one_says_how_much_worse_it_may_be():
    proof = next(each for each in PROOFS["fp16_bf16"] if each.floor < 1)
    assert holds(proof, kept(proof.ratio, low=0.995))
    assert not holds(proof, kept(proof.ratio, low=0.98))


def test_a_command_replaces_what_it_kept_before_and_nothing_else(tmp_path):
    assert stored(tmp_path / "none.jsonl") == {}
    path = tmp_path / "ratios.jsonl"
    keep([kept("a"), kept("b", command="other")], path)
    keep([kept("c")], path)
    assert set(stored(path)) == {"b", "c"}


def test_a_ratio_taken_now_says_with_what_and_beside_which_work():
    found = StoredRatio.measured_now(Ratio.exact("a / b", 6.0, 3.0, "bytes"), "manage.py bench x")
    assert (found.value, found.low, found.high, found.n) == (2.0, 2.0, 2.0, 1)
    assert found.versions["torch"]
    assert "cores" in found.machine
    for load, said in [(0.2, False), (3.14, True)]:
        found = StoredRatio.measured_now(Ratio.exact("a / b", 6.0, 3.0, "bytes"), "bench x", load)
        assert found.machine.endswith("shared (load 3.1 before)") is said, load
    assert Figure.of(Ratio("a / b", 2.0, 1.5, 2.5, 7, "bytes")).remark == "   1.5 to 2.5, n = 7"


def test_every_proof_is_of_something_that_runs_and_flexgens_of_both_its_ratios():
    for key in sorted(PROOFS):
        assert key in ABILITIES, key
    names = {proof.ratio for proof in PROOFS["flexgen"]}
    assert names == {offload_bench.NAME, offload_bench.READ_NAME}


# The bench of layouts asks the planner of what runs, and its page says what was kept.


DEVICE = DeviceSpec(
    id="host-x", kind="cpu", memory_bytes=2**34, memory_bandwidth_bytes_per_second=2e10,
    peak_flops_per_second={"fp32": 9e10}, op_overhead_seconds=2e-6, provenance="measured",
)  # fmt: skip
ALONE_CLUSTER = ClusterSpec(device=DEVICE)
MACHINE = Machine(
    ALONE_CLUSTER,
    ALONE_CLUSTER.as_ranks_of_cpu(RANKS, 2).model_copy(
        update={
            "intra_node_bandwidth_bytes_per_second": 6e8,
            "collective_latency_seconds": 7e-3,
            "hand_over_latency_seconds": 2e-3,
        }
    ),
)
MEASURED = {ALONE: [1.1], COPIES: [0.5, 0.7]}
EACH_CASE = pytest.mark.parametrize("case", MODELS, ids=[case.name for case in MODELS])


@EACH_CASE
def test_every_layout_takes_all_ranks_and_the_planner_chooses_the_fastest_of_them(case):
    found = [_options(name, strategy) for name, strategy in cases(case).items()]
    assert len(found) > 50
    assert {each.world_size for each in found} == {RANKS}
    assert len({each.model_dump_json() for each in found}) == len(found)
    calibration = calibration_of(case, MACHINE, MEASURED)
    choice = first_choice(case, MACHINE, calibration)
    assert (layout_of(choice) or LayoutOptions(data_parallel_size=RANKS)) in found
    chosen = predicted_seconds(case, MACHINE.ranks, choice, calibration)
    for name, strategy in cases(case).items():
        seconds = predicted_seconds(case, MACHINE.ranks, strategy, calibration)
        assert seconds >= 0.999 * chosen, name


def test_runs_that_took_twice_as_long_make_the_host_slower():
    case = MODELS[0]
    slower = {name: [2 * each for each in own] for name, own in MEASURED.items()}
    once, twice = (calibration_of(case, MACHINE, own).factors for own in (MEASURED, slower))
    assert once.keys() == twice.keys()
    assert all(twice[name].factor > once[name].factor for name in once)


def test_this_machine_is_told_to_the_planner_as_a_host_and_as_its_ranks(measured_host):
    exchanges = [
        CollectiveTime(collective=name, ranks=4, latency_seconds=wait, bytes_per_second=1e9)
        for name, wait in (("all_reduce", 7e-3), ("send", 2e-3))
    ]
    found = machine_of(measured_host, exchanges)
    assert found.alone.num_devices == 1
    assert found.ranks.num_devices == RANKS
    assert found.ranks.collective_latency_seconds == 7e-3
    assert found.ranks.hand_over_latency_seconds == 2e-3


@pytest.fixture
def measured_host():
    from runners.shared.facts import DeviceMeasurement, Microbench

    cpu = DeviceMeasurement(
        device="cpu", memory_bandwidth_bytes_per_second=2e10, flops_per_second={"fp32": 9e10},
        op_overhead_seconds=2e-6,
    )  # fmt: skip
    return Microbench(
        measured_at_ms=1, duration_seconds=1.0, torch_version="2.13", num_threads=2,
        devices=(cpu,), disk_write_bytes_per_second=1e9,
    )  # fmt: skip


def test_each_model_kept_its_first_choice_in_every_round_and_the_page_says_so():
    assert layouts.DOCS.read_text() == layouts.page(layouts.stored_results())
    for kept in layouts.stored_results():
        assert len(kept["seconds"][kept["first"]]) >= kept["regret"]["n"]
        assert kept["seconds"].keys() == kept["predicted"].keys()


def test_a_regret_is_kept_under_its_models_name():
    ratio = Ratio("other", 0.9, 0.8, 1.0, 5, "step seconds")
    found = LayoutComparison("wide", "a", {"a": 1.0}, {"a": [1.0]}, ratio, {})
    (kept,) = layouts.regrets([found])
    assert kept == ratio._replace(name="fastest other layout / planner's first choice, wide model")


def test_a_regret_above_five_per_cent_is_called_so():
    kept = layouts.stored_results()[0]
    lost = {**kept["regret"], "value": 0.9, "low": 0.85, "high": 0.94}
    text = layouts.page([{**kept, "regret": lost}])
    assert "11.1 % (6.4 to 17.6)" in text
    assert text.count("| no |") == 1


# What real ranks hold, against the planner's terms: kept rows and their page.


FOUND = memory.stored_memory()[1]


def total(name):
    return sum(getattr(FOUND[name], term) for term in RankMemory.TERMS)


def test_every_case_was_counted_within_a_tenth_of_the_plan_and_the_page_says_so():
    assert set(FOUND) == {case.name for case in CASES}
    rows = [row for held in FOUND.values() for row in rows_of(held)]
    assert [row for row in rows if abs(row.error) > memory.WITHIN] == []
    assert memory.DOCS.read_text() == memory.page()


def test_memory_falls_in_the_order_of_the_literature():
    for ranks in (2, 4):
        sizes = [total(f"{name} on {ranks} ranks") for name in ("DDP", "ZeRO-1", "ZeRO-2")]
        assert sizes == sorted(sizes, reverse=True)
        assert total(f"ZeRO-3 on {ranks} ranks") < sizes[-1]
    ways = ["AdamW", "selective recomputation", "full recomputation"]
    held = [FOUND[name].activations for name in ways]
    assert held == sorted(held, reverse=True)
    assert total("AdamW") > total("AdamW 8-bit") > total("LOMO") > total("LoRA") > total("QLoRA")


def test_the_planner_puts_the_cases_in_the_same_order_of_states():
    cases = {case.name: predicted_bytes(case) for case in CASES}
    for term in ("weights", "gradients", "optimizer_states"):
        for stage in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
            four, two = (cases[f"{stage} on {ranks} ranks"][term] for ranks in (4, 2))
            held = [getattr(FOUND[f"{stage} on {ranks} ranks"], term) for ranks in (4, 2)]
            assert (four < two) == (held[0] < held[1])


def test_each_stage_of_zero_divides_its_term_by_the_ranks():
    found = {each.name: each.value for each in sharding_ratios(FOUND)}
    assert len(found) == 3
    assert all(value == pytest.approx(4, rel=0.01) for value in found.values())


def test_an_error_is_of_what_was_held():
    assert Row("a", "weights", 110.0, 100.0).error == pytest.approx(0.1)
    assert Row("a", "weights", 1.0, 0.0).error == 1.0
    assert Row("a", "weights", 0.0, 0.0).error == 0.0


def test_estimates_and_imports_are_measured_in_cpu_time(monkeypatch):
    """On a busy machine the time on the wall says how busy it is: 0.51 s of 0.12 at load 11."""
    monkeypatch.setattr(command, "ROUNDS", 1)
    monkeypatch.setattr(command, "time", SimpleNamespace(process_time=time.process_time))
    monkeypatch.setattr(command, "_python", lambda _code, **_options: None)
    figures = [*command.estimates(), *command.replan(), *command.planner_import()]
    assert len(figures) == 10
    assert all(math.isfinite(figure.value) for figure in figures)


# The bench of pages: its site is what it says, and every page of it answers.


@pytest.mark.django_db(databases="__all__")
def test_the_site_has_as_many_jobs_as_were_asked_for_and_each_page_is_timed(monkeypatch):
    monkeypatch.setattr(long_history, "HOSTS", 9)
    monkeypatch.setattr(long_history, "PLANS", 3)
    monkeypatch.setattr(long_history, "ROUNDS", 1)
    waiting = long_history.fill(20, num_waiting=4)
    seconds = long_history.seconds_of(waiting)
    assert Job.objects.exclude(state="queued").count() == 20
    assert Job.objects.filter(state="queued").count() == 4
    assert Host.objects.count() == 9
    assert Measurement.objects.count() == 20
    assert list(seconds) == long_history.names()
    assert all(value > 0 for value in seconds.values())


@pytest.mark.django_db(databases="__all__")
def test_growth_is_told_between_the_smallest_and_the_largest_site(monkeypatch, tmp_path):
    taken = {10: 0.1, 1000: 0.4}
    monkeypatch.setattr(
        "webapp.bench.long_history._measured",
        lambda _data, size: dict.fromkeys(long_history.names(), taken[size]),
    )
    told = {name: value for name, value, _ in long_history_metrics(tmp_path, [10, 1000])}
    assert told["home, 10 jobs"] == 0.1
    assert told["home: exponent of growth"] == pytest.approx(0.301, abs=1e-3)


# Transactions are counted in SQLite's own log, whoever made them.


@pytest.fixture
def database(tmp_path):
    """A database with a write-ahead log that never begins anew by itself."""
    link = sqlite3.connect(tmp_path / "db", isolation_level=None)
    link.execute("PRAGMA journal_mode=WAL")
    link.execute("PRAGMA wal_autocheckpoint=0")
    link.execute("CREATE TABLE t (x)")
    yield link
    link.close()


@pytest.fixture
def count(database, tmp_path):
    return CommitCount(tmp_path / "db-wal")


def test_what_was_rolled_back_or_read_or_before_does_not_count(count, database):
    count.update()
    assert count.commits == 0
    database.execute("BEGIN")
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("ROLLBACK")
    count.update()
    assert count.commits == 0
    database.execute("SELECT * FROM t").fetchall()
    count.update()
    assert count.commits == 0


def test_each_transaction_counts_once_whatever_it_wrote(database, count):
    for _ in range(3):
        database.execute("BEGIN")
        database.executemany("INSERT INTO t VALUES (?)", [("x" * 5000,)] * 50)
        database.execute("COMMIT")
    count.update()
    assert count.commits == 3


def test_a_log_that_begins_anew_is_counted_on(database, count):
    database.execute("INSERT INTO t VALUES (1)")
    count.update()
    database.execute("PRAGMA wal_checkpoint(RESTART)")
    database.execute("INSERT INTO t VALUES (2)")
    count.update()
    assert count.commits == 2


# Other planners beside ours: what is asked, what an absent one prints. No network, no peer.


FIGURES = dict.fromkeys(UNITS, 1.5)


def ends(returncode=0, stdout="", stderr=""):
    """A run that starts nothing: every command ends like this, and is kept in ``commands``."""

    def run(command, **_):
        run.commands.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    run.commands = []
    return run


def test_the_question_has_the_published_shape_of_its_model_and_the_rates_of_its_card():
    model, shape = get_model(QUESTION["model"]), QUESTION["shape"]
    published = {
        "layers": model.num_hidden_layers, "hidden": model.hidden_size,
        "heads": model.num_attention_heads, "key_value_heads": model.num_key_value_heads,
        "feed_forward": model.intermediate_size, "vocabulary": model.vocab_size,
    }  # fmt: skip
    assert {name: shape[name] for name in published} == published
    device, system = get_device(QUESTION["device"]), QUESTION["system"]
    assert system["memory_bytes_per_s"] == device.memory_bandwidth_bytes_per_second
    assert system["peak_flops_per_s"] == pytest.approx(
        device.peak_flops_per_second["bf16"], rel=1e-3
    )
    assert system["link_bytes_per_s"] == device.intra_node_bandwidth_bytes_per_second


def test_our_own_planner_answers_in_a_process_of_its_own():
    found = peers.answer_of("slipway", Path(sys.executable))
    assert found.reason == ""
    assert set(found.figures) == set(UNITS)
    assert found.figures["decode_s"] < found.figures["prefill_s"]
    assert 17e9 < found.figures["device_bytes"] < 80e9


def test_our_answer_beside_the_others_is_that_of_the_front_door():
    ask = script.slipway(QUESTION)
    assert ask(8, 32)["decode_s"] > ask(8, 1)["decode_s"]
    assert ask(4, 32)["device_bytes"] > ask(8, 32)["device_bytes"]


def test_a_planner_that_does_not_install_is_said_by_name_with_the_reason(tmp_path):
    run = ends(1, stderr="WARNING: slow\nERROR: No matching distribution found\n\n")
    found = list(peers.answers(tmp_path, run))
    assert [one.name for one in found[1:]] == list(OTHERS)
    assert found[3].reason == "genz-llm does not install: ERROR: No matching distribution found"


def test_a_planner_that_breaks_says_its_last_line_after_what_it_printed(tmp_path):
    run = ends(1, stderr="Traceback\nValueError: no such system")
    found = peers.answer_of("GenZ", tmp_path / "python", run)
    assert found == Answer("GenZ", reason="does not answer: ValueError: no such system")
    printed = "loading tables\n" + json.dumps({"version": "0.1", **FIGURES})
    found = peers.answer_of("GenZ", tmp_path / "python", ends(stdout=printed))
    assert found == Answer("GenZ", "0.1", FIGURES)


def test_a_planner_that_hangs_is_left_after_its_time(tmp_path):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    assert "timed out after 300" in peers.answer_of("GenZ", tmp_path / "python", run).reason


def test_an_environment_is_made_once(tmp_path):
    python, run = tmp_path / "genz-llm" / "bin" / "python", ends()
    (tmp_path / "genz-llm").mkdir()
    assert [peers.install("genz-llm", python, run) for _ in range(2)] == ["", ""]
    made, fetched = run.commands
    assert made[1:3] == ["-m", "venv"]
    assert fetched[1:] == ["-m", "pip", "install", "--quiet", "genz-llm"]


def test_an_installation_that_broke_off_is_tried_again(tmp_path):
    python, broken, whole = tmp_path / "p" / "bin" / "python", ends(1, stderr="no disk"), ends()
    (tmp_path / "p").mkdir()
    assert "no disk" in peers.install("p", python, broken)
    assert peers.install("p", python, whole) == ""


def test_the_cohort_is_drawn_from_rows_in_no_fit_and_ours_is_asked_as_they_were_measured():
    rows = peers.cohort()
    assert len({row["row_id"] for row in rows}) == peers.COHORT_SIZE
    assert peers.COHORT_TABLE.stem.startswith("unfitted")
    questions = [peers.cohort_question(row) for row in rows[:3]]
    assert all("tpot_ms" not in question for question in questions)
    found = script.answer_cohort("slipway", questions)
    for row, said in zip(rows, found["tpot_s"], strict=False):
        if said is not None:
            assert said == pytest.approx(float(row["tpot_ms"]) / 1e3, rel=0.4), row["row_id"]


def test_errors_on_the_cohort_count_answers_alone_and_say_how_many(tmp_path):
    said = [float(row["tpot_ms"]) / 1e3 * 1.5 for row in peers.cohort()]
    for refused, mean in [(0, 0.5), (4, 0.5), (peers.COHORT_SIZE, None)]:
        answered = [None] * refused + said[refused:]
        document = {"version": "2", "tpot_s": answered, "seconds": 48.0}
        shown = peers.cohort_rows("GenZ", tmp_path, ends(stdout=json.dumps(document)))
        figures = {name.rpartition(", ")[2]: value for name, value, _ in shown}
        assert figures["answered"] == peers.COHORT_SIZE - refused
        assert figures.get("mean") == (mean and pytest.approx(mean))
        assert figures["time of a question"] == pytest.approx(48.0 / peers.COHORT_SIZE)

    broken = ends(1, stderr="ValueError: no")
    answers = [Answer("GenZ", "2", FIGURES), Answer("x", reason="does not install")]
    (row,) = peers.cohort_figures(tmp_path, answers, broken)
    assert row == ("GenZ: cohort not answered (ValueError: no)", 0.0, "rows")
    assert broken.commands[0][0] == str(tmp_path / "genz-llm" / "bin" / "python")


def test_every_figure_is_shown_with_planner_version_and_unit():
    shown = list(peers.rows(Answer("GenZ", "0.1", FIGURES)))
    assert ("GenZ 0.1: decode step", 1.5, "s") in shown
    assert len(shown) == len(UNITS)


def test_a_strategy_that_a_planner_refuses_does_not_end_the_sweep(monkeypatch):
    def prepare(question):
        def ask(tensor, batch):
            if batch == 16:
                raise ValueError("too large")
            return {"prefill_s": 1.0}

        return ask

    monkeypatch.setitem(script.PLANNERS, "other", (prepare, "no such distribution"))

    found = script.measure_planner("other", QUESTION)

    assert found["strategies_per_s"] > 0
    assert found["version"] == "from source"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_bench_names_who_is_absent(monkeypatch, tmp_path, as_json):
    absent = Answer("GenZ", reason="genz-llm does not install: offline")
    monkeypatch.setattr(command, "answers", lambda _: [Answer("x", "1", FIGURES), absent])
    monkeypatch.setattr(command, "cohort_figures", lambda *_: iter(()))
    monkeypatch.setitem(command.BENCHES, "planner", lambda: iter(()))
    out = io.StringIO()
    call_command("bench", "planner", peers=tmp_path, json=as_json, stdout=out)
    said = json.loads(out.getvalue())[-1] if as_json else out.getvalue().splitlines()[-1]
    named = {"name": "GenZ", "reason": absent.reason}
    assert said == (named if as_json else f"GenZ: {absent.reason}")


def test_other_planners_belong_to_the_bench_of_the_planner(tmp_path):
    with pytest.raises(CommandError, match="belongs to `bench planner`, not to estimate"):
        call_command("bench", "estimate", peers=tmp_path)


# Sites and processes of benches end with them, however they end.


UP = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
part = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("part").write_text(str(part.pid))
print("Slipway is ready", flush=True)
time.sleep(600)
"""


def run_until(end, folder: Path, *processes) -> None:
    with site.running(folder), site.in_background(*processes):
        end()


def is_over(number: int) -> bool:
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_bench_that_fails_or_is_stopped_leaves_no_process_of_its_site(tmp_path, monkeypatch):
    (tmp_path / "manage.py").write_text(UP)
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "STOP_LIMIT_S", 0.1)
    monkeypatch.setattr(site, "_has_page", lambda _url: (tmp_path / "part").exists())
    context = multiprocessing.get_context("spawn")
    for end in (
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: pytest.fail("the bench broke"),
    ):
        (tmp_path / "part").unlink(missing_ok=True)
        sleeper = context.Process(target=time.sleep, args=(600,))
        with pytest.raises((SystemExit, pytest.fail.Exception)), site.ended_by_sigterm():
            run_until(end, tmp_path, sleeper)
        assert not sleeper.is_alive()
        number = int((tmp_path / "part").read_text())
        eventually(lambda number=number: is_over(number))


def test_what_the_benches_spawn_runs_before_django_is_set_up():
    ends = [live_path.send, live_path.watch, supervising.ship, speak]
    code = f"import pickle; pickle.loads({pickle.dumps(ends)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=settings.BASE_DIR, check=True)


def test_the_live_bench_divides_by_what_was_sent_and_handled():
    found = {
        name: value
        for name, value, *_ in live_path._rows_of_sent(
            100, [10, 35, 50], {"control": 0.36, "redis": 0.1}, [10] * 50, 2.0
        )
    }
    assert found["control process, an event"] == pytest.approx(0.36 / (60 * live_ends.EVENTS))
    sent = messages_of(Attempt(job_id="a"), "b", live_ends.batch_of("c", 1).events)
    shown = live_ends.INSTANT.findall(json.dumps(list(sent), separators=(",", ":")).encode())
    assert len(shown) == live_ends.SHOWN
    assert found["events with an instant that browsers saw"] == 50 / (100 * live_ends.SHOWN)
    assert found["redis process"] == 0.05
    for num_sent, waits in ((0, [1]), (30, [1]), (100, [])):
        with pytest.raises(CommandError, match="not busy"):
            list(live_path._rows_of_sent(num_sent, [10, 50], {"control": 1.0}, waits, 2.0))
