"""A validation: its command, its stages as processes, its figures and its report."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from runners.__main__ import main
from runners.prove import run
from runners.prove.report import (
    Check,
    Expectations,
    Figure,
    Hardware,
    Missing,
    PlannerQuery,
    Prediction,
    Report,
    Stage,
    number_text,
    render,
)
from runners.prove.run import ValidationRun, exit_code
from runners.shared.config import Credential

# The command: its options, its output, and the packages that it does without.

# What a machine with torch and transformers alone does not have.
WEB = ("django", "celery", "redis", "kombu", "httpx", "psycopg", "plotly", "structlog", "ulid")
WITHOUT = f"""
import sys
for name in {WEB!r}:
    sys.modules[name] = None
from runners.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_it_runs_where_no_package_of_the_site_is_installed(tmp_path):
    ended = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT, "prove", "--stages", "identity", "--small"),
            *("--device", "cpu", "--json", "--output", str(tmp_path), "--dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    report = Report.model_validate_json(ended.stdout)
    assert (ended.returncode, report.verdict) == (0, "proven")
    assert report.device != "unknown"
    assert json.loads((tmp_path / "report.json").read_text()) == report.model_dump(mode="json")


def test_a_wrong_option_names_the_value_and_the_limit(capsys):
    for option, value, words in [
        ("--stages", "rates,speeed", "no stage 'speeed'; there are identity, rates"),
        ("--minutes", "soon", "soon is not between 0.1 and 1440 minutes"),
        ("--minutes", "0", "0 is not between 0.1 and 1440 minutes"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(["prove", option, value])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err, (option, value)


def test_it_says_what_failed_and_where_the_report_lies(tmp_path, capsys, monkeypatch):
    bad = '{"record": "check", "name": "sum", "is_met": false, "expected": "3", "found": "4"}'
    monkeypatch.setattr(
        run,
        "ValidationRun",
        lambda **options: ValidationRun(
            **options, command=(sys.executable, "-c", f"print('''{bad}''')")
        ),
    )
    assert main(["prove", "--stages", "rates", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAIL   sum: 4" in said
    assert "rates: sum: expected 3, found 4" in said
    assert f"not signed: {tmp_path} holds no enrolled host" in said
    assert str(tmp_path / "prove" / "report.html") in said


# The parent of the stages: a stage may crash, hang, babble or fill the disk.

GOOD = '{"record": "figure", "name": "threads", "unit": "threads", "value": 1e9, "device": "cpu"}'
CREDENTIAL = Credential(
    server="http://127.0.0.1:8000",
    host_id="host-1",
    name="lab",
    credential="c",
    command_key="k",
    redis_url=None,
    beat_seconds=5.0,
)


def proof(folder, code: str, **options) -> Report:
    """Run two stages whose process is ``code``, with the stage's name in sys.argv[1]."""
    return ValidationRun(
        folder=folder,
        stages=("identity", "rates"),
        command=(sys.executable, "-c", code),
        **options,
    ).run()


def test_a_stage_that_ends_badly_is_named_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("runners.prove.run.GRACE_SECONDS", -4.0)  # a second for a stage
    said = f"print('''{GOOD}''', flush=True)"
    for turn, (code, state, words) in enumerate([
        (said, "done", ""),
        ("import os; os.kill(os.getpid(), 11)", "failed", "died by SIGSEGV"),
        ("raise SystemExit('no driver')", "failed", "code 1. no driver"),
        ("print('loading ...')", "failed", "invalid record: loading ..."),
        (said.replace("1e9", "NaN"), "failed", "invalid record"),
        ("while True: print('loading ...')", "cut", "killed after 1 s"),
        (f"{said}; import time; time.sleep(99)", "cut", "the last that it said is: threads"),
    ]):  # fmt: skip
        bad = f"import sys\nif sys.argv[1] == 'identity':\n  {code}\nelse:\n  {said}"
        folder = tmp_path / str(turn)
        folder.mkdir()
        report = proof(folder, bad, seconds=1.0)
        first, second = report.stages
        assert (first.state, words in (first.problem or "")) == (state, True), code
        assert (second.state, len(second.figures)) == ("done", 1), code
        assert exit_code(report) == {"done": 0, "failed": 1, "cut": 3}[state], code


def test_a_cut_leaves_the_report_of_what_was_done(tmp_path):
    seen: list[Report] = []

    def cut(stage: Stage, record: object) -> None:
        seen.append(Report.model_validate_json((tmp_path / "report.json").read_bytes()))

    proof(tmp_path, f"print('''{GOOD}''')", credential=CREDENTIAL, say=cut)
    first = seen[0]
    assert [(stage.state, len(stage.records)) for stage in first.stages] == [
        ("cut", 1),
        ("not run", 0),
    ]
    assert first.verdict == "incomplete"
    assert all(each.is_signed_with("k") for each in seen)
    assert "Identity" in (tmp_path / "report.html").read_text()


def test_a_full_disk_is_named_before_a_stage_fails_on_it(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**12, 10**12, 10**6))
    report = proof(tmp_path, f"print('''{GOOD}''')")
    assert {stage.state for stage in report.stages} == {"failed"}
    assert "0.0 GB free" in report.stages[0].problem


def test_what_a_stage_wrote_and_started_is_gone_after_it(tmp_path):
    code = (
        "import pathlib, subprocess, sys\n"
        "pathlib.Path(sys.argv[2], 'left').write_text('x')\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"print('''{GOOD.replace('threads', 'pid')}'''.replace('1e9', str(child.pid)))"
    )
    report = proof(tmp_path, code)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["report.html", "report.json"]
    for stage in report.stages:
        (pid,) = (int(each.value) for each in stage.figures)
        assert not _runs(pid)
    assert json.loads((tmp_path / "report.json").read_text())["seconds"] > 0


def _runs(pid: int) -> bool:
    try:
        with Path(f"/proc/{pid}/stat").open() as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The figures against datasheet and planner: slow, too fast, on an unknown device.

H100 = Hardware("NVIDIA H100 80GB HBM3", "gpu", 85_520_809_984, 2**38)
BANDWIDTH, PEAK = 3.35e12, 989.4e12  # of its datasheet
SHAPE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
}
DECODE = PlannerQuery(
    model=SHAPE,
    workload={"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 64},
    strategy={"weight_dtype": "bf16"},
    engine="gpt_fast",
    metric="decode_tokens_per_second",
)


def figure(name: str, value: float, unit: str = "bytes/s", question=None) -> Figure:
    """Return a figure of the first GPU."""
    return Figure(name=name, unit=unit, value=value, device="cuda:0", question=question)


def test_a_rate_far_from_the_datasheet_is_named():
    for name, value, is_met in [
        ("memory triad", 0.92 * BANDWIDTH, True),
        ("memory copy", 0.4 * BANDWIDTH, False),  # slow: another program, a lowered clock
        ("memory triad", 1.2 * BANDWIDTH, False),  # another device than its name
        ("matmul bf16", 0.7 * PEAK, True),
        ("matmul bf16", 0.07 * PEAK, False),  # without tensor cores
        ("copy host to device, pinned", 6e9, False),  # four lanes of sixteen
    ]:
        figured, check = Expectations(H100, []).complete([figure(name, value)])
        assert figured.prediction.value > 0, (name, value, is_met)
        assert isinstance(check, Check), (name, value, is_met)
        assert (check.is_met, name in check.name) == (is_met, True), (name, value, is_met)
        assert check.advice, (name, value, is_met)


def test_a_speed_is_predicted_from_the_datasheet_and_again_from_the_measured_rates():
    rates = [figure("memory triad", 0.5 * BANDWIDTH), figure("matmul bf16", 0.6 * PEAK, "op/s")]
    speed = figure("decode bf16, batch 1, compiled", 120.0, "tokens/s", DECODE)
    (predicted,) = (each.prediction for each in Expectations(H100, rates).complete([speed]))
    assert predicted.low < predicted.value < predicted.high
    assert predicted.calibrated < 0.8 * predicted.value  # half the bandwidth
    assert predicted.term


def test_a_cpu_has_no_datasheet_and_is_predicted_from_its_own_rates():
    cpu = Hardware("AMD EPYC", "cpu", 2**34, 2**34)
    rates = [figure("memory triad", 2e10), figure("matmul bf16", 2e11, "op/s")]
    speed = figure("decode bf16, batch 1, eager", 1.0, "tokens/s", DECODE)
    assert [each.prediction for each in Expectations(cpu, []).complete([speed])] == [None]
    triad, missing, *_, speed = Expectations(cpu, rates).complete([*rates, speed])
    assert (triad.prediction, isinstance(missing, Missing)) == (None, True)
    assert "no datasheets of CPUs" in missing.why
    assert "this run" in speed.prediction.source


def test_the_planner_learns_the_hosts_factors_from_what_was_measured():
    expectations = Expectations(H100, [])
    eager = DECODE.model_copy(update={"engine": None})
    speed = figure("decode bf16, batch 1, eager", 30.0, "tokens/s", eager)
    (completed,) = expectations.complete([speed])
    slower = completed.prediction.value / 30.0
    compiled = figure("decode bf16, batch 1, compiled", 60.0, "tokens/s", DECODE)
    calibration = expectations.calibration([speed, compiled], "lab")
    (factor,) = calibration.factors.values()
    assert factor.n == 1  # the compiled step is not how the runner works by default
    assert 1.0 < factor.factor <= slower  # one run moves a factor by a part of its error
    assert expectations.calibration([figure("memory triad", 1.0)], "lab") is None


def test_the_products_own_goals_of_speed_are_checked_on_a_gpu():
    for tokens, flops, is_met in [(175.0, 0.5, True), (100.0, 0.2, False)]:
        rates = [figure("memory triad", 0.92 * BANDWIDTH), figure("matmul bf16", 0.7 * PEAK)]
        figures = [
            figure("weights that a decode step reads", 15.01e9, "bytes"),
            figure("decode bf16, batch 1, eager, peak memory", 18.7e9, "bytes"),
            figure("decode bf16, batch 1, eager", 50.0, "tokens/s"),
            figure("decode bf16, batch 16, eager", 900.0, "tokens/s"),
            figure("decode bf16, batch 1, compiled", tokens, "tokens/s"),
            figure("decode int4, batch 1, compiled", 400.0 if is_met else 110.0, "tokens/s"),
            figure("training, model FLOP/s", flops * PEAK, "op/s"),
        ]
        goals = list(Expectations(H100, rates).goals(figures))
        assert [each.is_met for each in goals] == [is_met] * 3, (tokens, flops, is_met)
        stage = Stage(name="speed", state="done", records=tuple(goals))
        report = Report(began_at_ms=0, hostname="lab", stages=(stage,))
        assert report.verdict == "proven"  # a host is not at fault for the product's goals
        assert ("not reached by Slipway" in render(report)) == (not is_met)


def test_peak_memory_stands_beside_the_planners():
    peak = DECODE.model_copy(update={"metric": "per_device_peak_bytes"})
    (completed,) = Expectations(H100, []).complete([figure("peak", 18e9, "bytes", peak)])
    assert 16e9 < completed.prediction.value < 20e9
    assert completed.prediction.low < completed.prediction.value < completed.prediction.high


def test_a_mig_instance_is_compared_with_its_share_and_an_unknown_gpu_says_that_it_is_not():
    triad = figure("memory triad", 0.9 * BANDWIDTH / 2)
    instance = Hardware("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "gpu", 42 * 10**9, 2**38)
    figured, check = Expectations(instance, []).complete([triad])
    assert figured.prediction.value == BANDWIDTH / 2
    assert check.is_met
    for name in ("NVIDIA H100 80GB HBM3 MIG 5g.50gb", "Homemade 9000"):
        unknown = instance._replace(name=name)
        _, missing = Expectations(unknown, []).complete([triad])
        assert f"no datasheet of {name} is known" in missing.why


# The report: its verdict, its signature, its numbers and its page.

MET = Check(name="sum", is_met=True, expected="3", found="3")
UNMET = Check(name="sum", is_met=False, expected="3", found="<4>", advice="Replace it.")
NO_UNITS = Missing(name="matmul fp8", why="a CPU has no units for FP8")
NO_LIBRARY = Missing(name="qlora", cause="library", why="bitsandbytes is missing")
SPEED = Figure(
    name="decode bf16, batch 1",
    unit="tokens/s",
    value=20.0,
    samples=(19.0, 20.0, 21.0),
    device="cpu",
    prediction=Prediction(value=30.0, low=25.0, high=36.0, source="datasheet", term="weights"),
)


def report_of(*stages: Stage) -> Report:
    """Return a report with these stages."""
    return Report(began_at_ms=1_790_000_000_000, hostname="h<1>", stages=stages)


def done(*records, state="done", problem=None) -> Stage:
    """Return a stage with these records."""
    return Stage(name="rates", state=state, records=records, problem=problem)


def test_a_run_is_proven_only_if_every_stage_ended_and_every_check_is_met():
    for stages, verdict in [
        ([done(MET, NO_UNITS)], "proven"),
        ([done(MET, NO_LIBRARY)], "incomplete"),
        ([done(MET), Stage(name="jobs")], "incomplete"),
        ([done(MET, state="cut")], "incomplete"),
        ([done(UNMET, NO_LIBRARY)], "failed"),
        ([done(MET, state="failed", problem="its process died by SIGSEGV")], "failed"),
    ]:
        assert report_of(*stages).verdict == verdict, (stages, verdict)


def test_a_changed_report_is_not_the_signed_one():
    signed = report_of(done(UNMET)).signed("key")
    assert signed.is_signed_with("key")
    assert Report.model_validate_json(signed.model_dump_json()).is_signed_with("key")
    assert not signed.is_signed_with("another key")
    assert not signed.model_copy(update={"stages": (done(MET),)}).is_signed_with("key")
    assert not report_of(done(MET)).is_signed_with("key")


def test_the_page_names_what_failed_and_what_to_do_and_escapes_what_it_shows():
    page = render(report_of(done(UNMET, SPEED, NO_LIBRARY)))
    for words in (
        "Something is wrong",
        "sum: expected 3, found &lt;4&gt;. Replace it.",
        "h&lt;1&gt;",
        "20 tokens/s",
        "25 to 36 tokens/s<br>outside",
        "weights",
        "qlora: bitsandbytes is missing",
        "Not signed.",
    ):
        assert words in page


def test_a_number_has_three_digits_and_its_units_prefix():
    for value, unit, words in [
        (3.35e12, "bytes/s", "3.35 TB/s"),
        (9.89e14, "op/s", "989 Top/s"),
        (0.0, "bytes", "0 B"),
        (0.0042, "s", "4.2 ms"),
        (2.5, "s", "2.5 s"),
        (12345.6, "tokens/s", "12,346 tokens/s"),
    ]:
        assert number_text(value, unit) == words, (value, unit, words)
