"""The scripts that check a claim: their parts, the load that they send, how they judge."""

import json
import random
import re
import statistics
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.exports.export import claims_of, prediction_line
from planner.exports.probes import serving, training
from planner.exports.probes.report import report
from planner.exports.probes.serving import Sample, figures, words
from planner.exports.probes.training import median_figures, read, step_seconds
from planner.exports.registry import measure_text, verification_input
from tests.planner.exports.making import SERVE, made, trained

LOAD = {"global_batch_size": 64, "sequence_length": 4096, "devices": 8}
LOGS = {
    "step_seconds=4.0": 4.0,
    "iteration 5/100 | elapsed time per iteration (ms): 4000.0 | loss": 4.0,
    "\x1b[31mstep: 5  tps: 8,192  mfu: 40%\x1b[0m": 4.0,
    "RunningAvgSamplesPerSec=16.1, CurrSamplesPerSec=16.0, MemAllocated=1GB": 4.0,
    "{'train_runtime': 1, 'train_samples_per_second': 16.0}": 4.0,
    " 10%|#  | 1/10 [00:04<00:36,  4.00s/it]": 4.0,
    " 10%|#  | 1/10 [00:04<00:36,  2.00it/s]": 0.5,
}


class Server(BaseHTTPRequestHandler):
    """A completions server that answers each request with its tokens at once."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_args):
        """Say nothing: the tests read the script's own words."""


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    found.bodies = []
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def ran(tmp_path, text, *arguments):
    script = tmp_path / "measure.py"
    script.write_text(text)
    command = [sys.executable, "-I", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)


SMALL = {**SERVE, "input_tokens": 8, "output_tokens": 4, "concurrency": 3}


def test_the_script_sends_the_load_of_the_claim_and_judges(tmp_path, server):
    address = f"http://127.0.0.1:{server.server_port}"
    done = ran(tmp_path, measure_text(made(SMALL)), "--base-url", address)
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert lengths.count((8, 4)) == 12
    assert "output_tokens_per_second" in done.stdout
    assert "outside" in done.stdout
    assert done.returncode == 1, done.stderr


def test_a_measurement_ends_well_inside_every_interval_and_says_how_far_outside(capsys):
    claim = {"figures": {"step_seconds": {"value": 4.0, "low": 3.0, "high": 5.0}}}
    assert report(claim, {"step_seconds": 4.5}) == 0
    assert "inside" in capsys.readouterr().out
    assert report(claim, {"step_seconds": 8.0}) == 1
    assert "2.00 x predicted" in capsys.readouterr().out


def test_times_are_means_over_requests_rates_over_the_run_and_one_token_has_no_gap():
    samples = [serving.Sample(0.0, 1.0, 3.0, 5), serving.Sample(0.0, 2.0, 5.0, 4)]
    found = serving.figures(samples, 5.0)
    assert found["ttft_seconds"] == 1.5
    assert found["tpot_seconds"] == pytest.approx(5 / 7)
    assert found["output_tokens_per_second"] == 9 / 5
    assert figures([Sample(0.0, 1.0, 1.0, 1)], 1.0)["tpot_seconds"] == 0.0


def test_lengths_vary_as_much_as_the_plan_says():
    draw = random.Random(1)  # noqa: S311 - not for secrets
    for variation in (0.0, 0.5, 1.0):
        found = serving.lengths(draw, 400, variation, 4000)
        assert statistics.mean(found) == pytest.approx(400, rel=0.01), variation
        assert statistics.pstdev(found) / 400 == pytest.approx(variation, rel=0.06, abs=1e-9)


def test_prompts_share_as_much_as_the_plan_says(server):
    claim = verification_input(made({**SMALL, "prefix_share_ratio": 0.5}))
    serving.run(f"http://127.0.0.1:{server.server_port}", "m", claim, 3)
    prompts = [body["prompt"] for body in server.bodies]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 3


def test_every_frameworks_log_tells_its_step_time_without_the_first_steps():
    for line, seconds in LOGS.items():
        assert training.read(line, LOAD) == [pytest.approx(seconds)], (line, seconds)
    found = training.median_figures([90.0, 4.0, 4.0, 5.0], LOAD, 1)
    assert found["step_seconds"] == 4.0
    assert found["tokens_per_second"] == 64 * 4096 / 4.0


@pytest.mark.parametrize(("seconds", "status"), [(4.1, 0), (9.0, 1)])
def test_the_training_script_reads_a_log_and_judges(tmp_path, seconds, status):
    log = tmp_path / "run.log"
    log.write_text(f"step_seconds={seconds}\n" * 5)
    done = ran(tmp_path, measure_text(trained(data_parallel_size=8)), str(log))
    assert done.returncode == status, done.stderr
    assert "5 logged steps" in done.stdout


def test_a_log_without_step_times_is_no_measurement(tmp_path):
    (tmp_path / "run.log").write_text("nothing here")
    done = ran(tmp_path, measure_text(trained()), str(tmp_path / "run.log"))
    assert done.returncode == 2
    assert "no step time" in done.stdout


def test_an_open_loop_is_measured_for_a_minute_a_batch_once_a_compression_not():
    workload = {**SMALL, "request_rate_per_second": 5.0, "concurrency": None}
    claim = verification_input(made(workload))
    assert claim["requests"] == 300
    assert claim["load"]["request_rate_per_second"] == 5.0

    claim = verification_input(
        made({"kind": "generate", "batch_size": 7, "input_tokens": 8, "output_tokens": 4})
    )
    assert (claim["requests"], claim["load"]["concurrency"]) == (7, 7)

    case = made({"kind": "compress", "method": "gptq"})
    assert measure_text(case) == ""


def test_claims_carry_their_bounds():
    case = made()
    found = claims_of(case.plan, "serve")
    assert found["ttft_seconds"] == {"value": 0.25, "low": 0.2, "high": 0.3125}
    assert found["output_tokens_per_second"]["value"] == 2500.0
    assert "time to first token 0.25 s (80 %: 0.2 to 0.3125)" in prediction_line(case)


SHORT_LOAD = {"global_batch_size": 32, "sequence_length": 1000, "devices": 4}
TIMES = st.floats(0.0, 100.0)


def claim(low, high, value=2.0):
    return {"figures": {"step_seconds": {"value": value, "low": low, "high": high}}}


@pytest.mark.parametrize(
    ("value", "status"), [(1.0, 0), (4.0, 0), (0.999, 1), (4.001, 1), (2.0, 0)]
)
def test_the_ends_of_an_interval_belong_to_it(value, status, capsys):
    assert report(claim(1.0, 4.0), {"step_seconds": value}) == status
    assert ("outside" in capsys.readouterr().out) == bool(status)


def test_figures_without_interval_or_measurement_are_not_judged_and_misses_are_said(capsys):
    assert report(claim(None, None), {"step_seconds": 1e6}) == 0
    assert "1e+06" in capsys.readouterr().out
    assert report(claim(1.0, 4.0), {"tokens_per_second": 5.0}) == 0
    assert "step_seconds" not in capsys.readouterr().out
    report(claim(1.0, 4.0, value=2.0), {"step_seconds": 9.0})
    assert "outside, 4.50 x predicted" in capsys.readouterr().out


def test_each_figure_is_judged_apart_and_one_outside_is_enough(capsys):
    both = {
        "figures": {
            "near": {"value": 1.0, "low": 0.5, "high": 2.0},
            "far": {"value": 1.0, "low": 0.5, "high": 2.0},
        }
    }

    assert report(both, {"near": 1.5, "far": 3.0}) == 1

    printed = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[-1] for line in printed] == ["inside", "predicted"]


def test_two_requests_at_once_are_averaged_and_their_rates_taken_together():
    """First tokens after 1 and 3 seconds; 10 and 20 more tokens over 5 and 10 seconds."""
    samples = [Sample(0.0, 1.0, 6.0, 11), Sample(0.0, 3.0, 13.0, 21)]

    found = figures(samples, 13.0)

    assert found == pytest.approx(
        {
            "ttft_seconds": 2.0,
            "tpot_seconds": 15 / 30,
            "latency_seconds": 19 / 2,
            "output_tokens_per_second": 32 / 13,
            "requests_per_second": 2 / 13,
        }
    )


@settings(max_examples=80, deadline=None)
@given(spans=st.lists(st.tuples(TIMES, TIMES, st.integers(1, 50)), min_size=1, max_size=8))
def test_no_mean_lies_outside_of_what_was_seen(spans):
    samples = [Sample(0.0, first, first + rest, count) for first, rest, count in spans]
    found = figures(samples, 100.0)
    firsts = [sample.first for sample in samples]
    assert min(firsts) - 1e-9 <= found["ttft_seconds"] <= max(firsts) + 1e-9
    assert found["ttft_seconds"] <= found["latency_seconds"] + 1e-9
    assert found["output_tokens_per_second"] >= found["requests_per_second"]


def test_prompts_are_tokens_of_the_vocabulary_and_never_its_padding():
    drawn = words(random.Random(4), {"vocab_size": 8}, 2000)  # noqa: S311 - not for secrets
    assert set(drawn) == {1, 2, 3, 4, 5, 6, 7}
    assert len(drawn) == 2000


def test_each_way_to_log_a_speed_is_turned_into_the_same_step():
    for name, value, seconds in (
        ("step_seconds", 2.5, 2.5),
        ("step_milliseconds", 2500.0, 2.5),
        ("tokens_per_second_per_device", 3200.0, 2.5),  # 32,000 tokens on 4 devices
        ("samples_per_second", 12.8, 2.5),
        ("seconds_per_iteration", 2.5, 2.5),
        ("iterations_per_second", 0.4, 2.5),
    ):
        assert step_seconds(name, value, SHORT_LOAD) == pytest.approx(seconds), (
            name,
            value,
            seconds,
        )


def test_a_log_is_read_in_its_own_way_and_its_median_is_behind_the_warm_up():
    for name in ("tokens_per_second_per_device", "samples_per_second", "iterations_per_second"):
        assert step_seconds(name, 0.0, SHORT_LOAD) == 0.0, name
    log = "step_seconds=2.0 tps: 99\n 1.5s/it\nstep_seconds: 3.0\n"
    assert read(log, SHORT_LOAD) == [2.0, 3.0]
    assert read("elapsed time per iteration (ms): 12,500.0", SHORT_LOAD) == [12.5]
    assert read('{"step_seconds": 2.5e-1}', SHORT_LOAD) == [0.25]

    for steps, warm_up, median in (
        ([9.0, 9.0, 2.0, 3.0, 4.0], 2, 3.0),
        ([9.0, 5.0], 2, 7.0),
        ([1.0, 2.0, 30.0], 0, 2.0),
    ):
        found = median_figures(steps, SHORT_LOAD, warm_up)
        assert found == {"step_seconds": median, "tokens_per_second": 32_000 / median}


def test_a_script_carries_its_exports_claim_and_needs_the_standard_library_alone():
    case = made({**SERVE, "concurrency": 7})
    told = re.search(r"json\.loads\(r'''(.*?)'''\)", measure_text(case), re.DOTALL)
    assert json.loads(told[1]) == verification_input(case)
    assert verification_input(case)["load"]["concurrency"] == 7
    assert verification_input(case)["requests"] == 4 * 7

    for case in (made(), trained()):
        text = measure_text(case)
        imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
        assert "planner" not in text.split("CLAIM")[0], case
        assert imported <= {
            *("argparse", "json", "random", "re", "statistics", "sys"),
            *("threading", "time", "urllib", "dataclasses", "pathlib", "typing"),
        }
        compile(text, "measure.py", "exec")


def test_an_open_loop_sends_a_minute_of_requests_and_at_least_a_hundred():
    open_loop = {name: value for name, value in SERVE.items() if name != "concurrency"}
    for rate, requests in ((0.5, 100), (1.0, 100), (2.0, 120), (50.0, 3000)):
        case = made({**open_loop, "request_rate_per_second": rate})
        found = verification_input(case)
        assert found["requests"] == requests, (rate, requests)
        assert found["load"]["request_rate_per_second"] == rate, (rate, requests)
        assert "concurrency" not in found["load"], (rate, requests)
