"""Other planners beside ours: what is asked, what an absent one prints. No network, no peer."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from planner.catalog.devices import get_device
from planner.catalog.models import get_model
from webapp.core.management.commands import bench as command
from webapp.core.peers import answer as script
from webapp.core.peers import bench
from webapp.core.peers.bench import OTHERS, QUESTION, UNITS, Answer

FIGURES = dict.fromkeys(UNITS, 1.5)


def ends(returncode=0, stdout="", stderr=""):
    """A run that starts nothing: every command ends like this, and is kept in ``commands``."""

    def run(command, **_):
        run.commands.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    run.commands = []
    return run


def test_the_question_has_the_published_shape_of_its_model():
    model, shape = get_model(QUESTION["model"]), QUESTION["shape"]

    assert shape["layers"] == model.num_hidden_layers
    assert shape["hidden"] == model.hidden_size
    assert shape["heads"] == model.num_attention_heads
    assert shape["key_value_heads"] == model.num_key_value_heads
    assert shape["feed_forward"] == model.intermediate_size
    assert shape["vocabulary"] == model.vocab_size


def test_the_question_has_the_rates_of_its_card():
    device, system = get_device(QUESTION["device"]), QUESTION["system"]

    assert system["memory_bytes_per_s"] == device.memory_bandwidth_bytes_per_second
    assert system["peak_flops_per_s"] == pytest.approx(
        device.peak_flops_per_second["bf16"], rel=1e-3
    )
    assert system["link_bytes_per_s"] == device.intra_node_bandwidth_bytes_per_second


def test_our_own_planner_answers_in_a_process_of_its_own():
    found = bench.answer_of("slipway", Path(sys.executable))

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

    found = list(bench.answers(tmp_path, run))

    assert [one.name for one in found[1:]] == list(OTHERS)
    assert found[3].reason == "genz-llm does not install: ERROR: No matching distribution found"


def test_a_planner_that_breaks_while_it_answers_says_its_last_line(tmp_path):
    run = ends(1, stderr="Traceback\nValueError: no such system")

    found = bench.answer_of("GenZ", tmp_path / "python", run)

    assert found == Answer("GenZ", reason="does not answer: ValueError: no such system")


def test_a_planner_that_hangs_is_left_after_its_time(tmp_path):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    assert "timed out after 300" in bench.answer_of("GenZ", tmp_path / "python", run).reason


def test_an_environment_is_made_once(tmp_path):
    python, run = tmp_path / "genz-llm" / "bin" / "python", ends()
    (tmp_path / "genz-llm").mkdir()

    assert [bench.install("genz-llm", python, run) for _ in range(2)] == ["", ""]

    made, fetched = run.commands
    assert made[1:3] == ["-m", "venv"]
    assert fetched[1:] == ["-m", "pip", "install", "--quiet", "genz-llm"]


def test_an_installation_that_broke_off_is_tried_again(tmp_path):
    python, broken, whole = tmp_path / "p" / "bin" / "python", ends(1, stderr="no disk"), ends()
    (tmp_path / "p").mkdir()

    assert "no disk" in bench.install("p", python, broken)
    assert bench.install("p", python, whole) == ""


def test_what_a_planner_prints_before_its_answer_is_passed_over(tmp_path):
    printed = "loading tables\n" + json.dumps({"version": "0.1", **FIGURES})

    found = bench.answer_of("GenZ", tmp_path / "python", ends(stdout=printed))

    assert found == Answer("GenZ", "0.1", FIGURES)


def test_every_figure_is_shown_with_planner_version_and_unit():
    shown = list(bench.rows(Answer("GenZ", "0.1", FIGURES)))

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

    found = script.measured("other", QUESTION)

    assert found["strategies_per_s"] > 0
    assert found["version"] == "from source"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_bench_names_who_is_absent(monkeypatch, tmp_path, as_json):
    absent = Answer("GenZ", reason="genz-llm does not install: offline")
    monkeypatch.setattr(command, "answers", lambda _: [Answer("x", "1", FIGURES), absent])
    monkeypatch.setitem(command.BENCHES, "planner", lambda: iter(()))
    out = io.StringIO()

    call_command("bench", "planner", peers=tmp_path, json=as_json, stdout=out)

    said = json.loads(out.getvalue())[-1] if as_json else out.getvalue().splitlines()[-1]
    named = {"name": "GenZ", "reason": absent.reason}
    assert said == (named if as_json else f"GenZ: {absent.reason}")


def test_other_planners_belong_to_the_bench_of_the_planner(tmp_path):
    with pytest.raises(CommandError, match="belongs to `bench planner`, not to estimate"):
        call_command("bench", "estimate", peers=tmp_path)
