"""The scripts that check a claim: they run alone, send the load and judge what they measure."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from planner.exports.export import claim_words, claims_of
from planner.exports.probes import serving, training
from planner.exports.probes.report import report
from planner.exports.registry import claim_of, measure_text
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


def test_a_measurement_inside_every_interval_ends_well(capsys):
    claim = {"figures": {"step_seconds": {"value": 4.0, "low": 3.0, "high": 5.0}}}
    assert report(claim, {"step_seconds": 4.5}) == 0
    assert "inside" in capsys.readouterr().out


def test_a_measurement_outside_says_how_far(capsys):
    claim = {"figures": {"step_seconds": {"value": 4.0, "low": 3.0, "high": 5.0}}}
    assert report(claim, {"step_seconds": 8.0}) == 1
    assert "2.00 x predicted" in capsys.readouterr().out


def test_times_are_means_over_requests_and_rates_over_the_run():
    samples = [serving.Sample(0.0, 1.0, 3.0, 5), serving.Sample(0.0, 2.0, 5.0, 4)]
    found = serving.figures(samples, 5.0)
    assert found["ttft_seconds"] == 1.5
    assert found["tpot_seconds"] == pytest.approx(5 / 7)
    assert found["output_tokens_per_second"] == 9 / 5


def test_prompts_share_as_much_as_the_plan_says(server):
    claim = claim_of(made({**SMALL, "prefix_share_ratio": 0.5}))
    serving.run(f"http://127.0.0.1:{server.server_port}", "m", claim, 3)
    prompts = [body["prompt"] for body in server.bodies]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 3


def test_every_frameworks_log_tells_its_step_time():
    for line, seconds in LOGS.items():
        assert training.read(line, LOAD) == [pytest.approx(seconds)], (line, seconds)


def test_the_first_steps_are_left_out():
    found = training.measured([90.0, 4.0, 4.0, 5.0], LOAD, 1)
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


def test_an_open_loop_is_measured_for_about_a_minute():
    workload = {**SMALL, "request_rate_per_second": 5.0, "concurrency": None}
    claim = claim_of(made(workload))
    assert claim["requests"] == 300
    assert claim["load"]["request_rate_per_second"] == 5.0


def test_an_offline_batch_is_one_round():
    claim = claim_of(
        made({"kind": "generate", "batch_size": 7, "input_tokens": 8, "output_tokens": 4})
    )
    assert (claim["requests"], claim["load"]["concurrency"]) == (7, 7)


def test_a_compression_has_no_script():
    case = made({"kind": "compress", "method": "gptq"})
    assert measure_text(case) == ""


def test_claims_carry_their_bounds():
    case = made()
    found = claims_of(case.plan, "serve")
    assert found["ttft_seconds"] == {"value": 0.25, "low": 0.2, "high": 0.3125}
    assert found["output_tokens_per_second"]["value"] == 2500.0
    assert "ttft_seconds 0.25 (80 %: 0.2 to 0.3125)" in claim_words(case)
