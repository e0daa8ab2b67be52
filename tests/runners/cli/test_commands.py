"""The commands: what they print, keep and return; their errors; what they load."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml

from planner.api import parse_model, plan
from planner.exports.registry import FORMATS
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import PlanAnswer, PlanRequest
from planner.specs.workload import Strategy
from runners.cli import output
from runners.cli.errors import ExitCode
from runners.cli.main import COMMANDS
from runners.cli.plan_request import build_document
from runners.cli.plans import plans_folder

SERVE = ("plan", "serve", "llama-3.1-8b", "--on", "h100", "--top", "2")
NOTHING = ("plan", "serve", "llama-3.1-70b", "--on", "rtx-3060", "--dtype", "bf16")


def answer_of(done):
    return parse_model(PlanAnswer, done.out)


def without_volatile(answer):
    return answer.model_dump(mode="json", exclude={"id", "searched"})


def test_json_is_the_planners_answer_and_yaml_the_same(slipway):
    done = slipway(*SERVE, "-o", "json")
    document = build_document("serve", "llama-3.1-8b", {"top": "2"}, hardware=["h100"]).document
    own = plan(PlanRequest.model_validate(document))
    assert (done.code, done.err) == (ExitCode.DONE, "")
    assert without_volatile(answer_of(done)) == without_volatile(own)
    as_yaml = yaml.safe_load(slipway(*SERVE, "-o", "yaml").out)
    assert without_volatile(PlanAnswer.model_validate(as_yaml)) == without_volatile(own)


def test_the_table_has_figures_with_interval_and_origin_and_alternatives_and_assumptions(
    slipway, monkeypatch
):
    done = slipway(*SERVE, "--ttft-p95", "500ms")
    assert done.code == ExitCode.DONE
    assert "meta-llama/Llama-3.1-8B on 1 x" in done.out
    for line in (
        r"^Best: \w+ weights .* (vllm|sglang)",
        r"^TTFT p95 +[\d.]+ ms +[\d.]+ (ms )?to [\d.]+ m?s +modelled",
        r"^Memory per device +[\d.]+ of 80\.0 GiB +[\d.]+ to [\d.]+ GiB",
        r"^Price +\$[\d.]+ an hour +published",
        r"^2 +\S+ weights",
        r"^Memory: .*kv cache [\d.]+ GiB",
        r"^- not given: input tokens 1,024 \(--input-len\)",
    ):
        assert re.search(line, done.out, re.MULTILINE), line
    assert "\x1b" not in done.out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = slipway(*SERVE, "--ttft-p95", "500ms").out
    assert max(map(len, narrow.splitlines())) <= 80
    assert len(re.findall(r" (?:modelled|published)$", narrow, re.MULTILINE)) >= 10
    assert done.err == ""


def test_a_long_training_says_what_failures_cost_and_takes_what_is_stated(slipway):
    asked = ("plan", "train", "llama-3.1-8b", "--on", "8xh100", "--tokens", "1B")
    stated = ("--set", "cluster.mean_time_between_failures_hours=2000")
    for more, shown in (((), False), (stated, True)):
        told = slipway(*asked, *more).out
        for line in (
            r"^Time between failures +(250 h|10\.4 days)",  # of eight devices
            r"^Checkpoint every +[\d.]+ \w+ +[\d,]+ steps",
            r"^Goodput +9[\d.]+ ?% +9[\d.]+",
            r"^Time with failures +",
        ):
            assert bool(re.search(line, told, re.MULTILINE)) == shown, (line, told)


def test_what_lies_in_host_memory_is_told_with_its_share_and_reason(slipway):
    for arguments, told in (
        (
            ("serve", "qwen3-30b-a3b", "--on", "rtx-4060", "--concurrency", "1"),
            r"Best: \S+ weights · \d0% of the weights in host memory .* GiB in host memory Limited",
        ),
        (
            ("train", "llama-3.1-8b", "--on", "8xh200"),
            r"GiB in host memory, for the copy of a checkpoint Limited",
        ),
    ):
        assert re.search(told, " ".join(slipway("plan", *arguments).out.split())), arguments


def test_a_plan_has_the_id_of_its_content_and_is_exported_and_explained_by_it(slipway):
    answer = answer_of(slipway(*SERVE, "-o", "json"))
    again = slipway(*SERVE)
    assert f"Plan {answer.id}:" in again.out
    (kept,) = plans_folder().iterdir()
    assert kept.stem == answer.id
    assert kept.stat().st_mode & 0o777 == 0o600

    for name in (answer.id, answer.id[:5], str(kept)):
        done = slipway("export", name, "--to", "vllm")
        assert done.code == ExitCode.DONE
        assert "vllm serve meta-llama/Llama-3.1-8B" in done.out
    assert "ctx-size" in slipway("export", answer.id, "--to", "llama.cpp").out
    assert "CLAIM" in slipway("export", answer.id, "--to", "vllm", "--measure").out

    assert slipway("explain", "last").out == slipway("explain", answer.id).out
    told = slipway("explain", answer.id)
    for rejection in answer.rejected.values():
        assert rejection.family in told.out
    assert json.loads(slipway("explain", answer.id, "-o", "json").out)["id"] == answer.id


def test_what_does_not_fit_prints_its_reasons_and_is_status_three(slipway):
    done = slipway(*NOTHING)
    assert done.code == ExitCode.NOTHING_FITS
    assert "Why others lost" in done.out
    assert re.search(r"needs [\d.]+ GiB per device", done.out)
    assert re.fullmatch(r"slipway: nothing fits this request: .*it would with: .*\n", done.err)

    done = slipway(*NOTHING, "--output=json")
    assert done.code == ExitCode.NOTHING_FITS
    assert answer_of(done).rejected
    problem = json.loads(done.err)
    assert problem["type"] == "urn:slipway:problem:nothing_fits"

    missed = slipway(*SERVE, "--ttft-p95", "1us")
    assert missed.code == ExitCode.NOTHING_FITS
    assert re.match(r"slipway: no plan meets the targets: .* the limit on TTFT p95", missed.err)
    assert "No plan meets the targets." in missed.out

    plan_id = answer_of(done).id
    assert slipway("export", plan_id, "--to", "vllm").code == ExitCode.NOTHING_FITS
    assert "to fit:" in slipway("explain", plan_id).out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("plan", "serve", "llama-99"), 2, "MODEL is 'llama-99': .*nearest: .*models find"),
        (("plan", "serve"), 2, "MODEL is missing"),
        ((*SERVE, "--ttft", "500"), 2, "--ttft is '500': it has no unit"),
        ((*SERVE, "--ttft-p96", "1s"), 2, "No such option: --ttft-p96"),
        ((*SERVE, "--concurency", "1"), 2, "--concurrency"),
        ((*SERVE, "--set", "top"), 2, "FIELD=VALUE"),
        ((*SERVE, "--objective", "speed"), 2, "--objective: .*throughput.*'speed'"),
        ((*SERVE, "--top", "200"), 2, "--top: .*equal to 100 .*200"),
        (
            (*SERVE, "--max-model-len", "9"),
            2,
            "--max-model-len: max_request_tokens is 9, less .*1280",
        ),
        (
            (*SERVE, "--rate", "5", "--burst", "5"),
            2,
            "--rate, --burst: .* exclude each other: give one",
        ),
        (
            ("plan", "compress", "llama-3.1-8b", "--on", "h100", "--tp", "2"),
            2,
            "No such option: --tp",
        ),
        ((*SERVE, "-o", "xml"), 2, "xml"),
        ((*SERVE, "--from", "/no/such/file"), 2, "/no/such/file cannot be read: No such file"),
        (
            ("plan", "tune", "llama-3.1-8b", "--on", "h100", "--quantization", "awq"),
            2,
            "--quantization: .*the method lora trains over weights of 16 .*qlora",
        ),
        ((*SERVE, "--tp", "3"), 2, "--tensor-parallel-size: .* take 3 devices, the cluster has 1"),
        (("plan", "dance", "llama-3.1-8b"), 2, "No such command 'dance'"),
        (("launch", "x", "--hours", "0"), 2, "--hours is '0': it must be above 0"),
        (("launch", "x", "--hours", "9000"), 2, "--hours is '9000': it can be 0.01 to 8,784"),
        (
            ("launch", "x", "--run", "dance"),
            2,
            "--run is 'dance': .*'job', 'endpoint', 'load' or 'evaluation'",
        ),
        (("launch", "x", "--secret", "s" * 41), 2, "--secret is .* at most 40 characters"),
        (("plann",), 2, "Did you mean 'plan'"),
        (("export", "0123456789", "--to", "vllm"), 1, "no plan with this id is kept in"),
        (("models", "find", "zzz"), 1, "no model of the catalog"),
    ],
)
def test_an_error_is_a_sentence_on_stderr_with_a_code_and_json_on_request(
    slipway, arguments, code, words
):
    done = slipway(*arguments)
    assert (done.code, done.out) == (code, "")
    assert re.search(words, done.err, re.DOTALL)
    assert "Traceback" not in done.err
    if "xml" not in arguments and arguments[0] not in {"plann", "export"}:
        problem = json.loads(slipway(*arguments, "-o", "json").err)
        assert set(problem) >= {"type", "title", "status", "detail", "code"}
        assert re.search(words, problem["detail"], re.DOTALL)


def test_an_unexpected_error_is_a_sentence_and_its_traceback_is_kept_without_arguments(
    slipway, folders, monkeypatch
):
    def crash(_):
        raise IndexError("list index")

    monkeypatch.setattr("planner.api.plan", crash)
    for arguments in (SERVE, (*SERVE, "-o", "json")):
        done = slipway(*arguments)
        assert (done.code, done.out) == (ExitCode.FAILED, "")
        assert "Traceback" not in done.err
    problem = json.loads(done.err)
    assert (problem["status"], problem["code"]) == (500, "unexpected")
    (kept,) = folders.rglob("last-error.txt")
    assert "IndexError: list index" in kept.read_text()
    assert "llama-3.1-8b" not in kept.read_text()
    assert str(kept) in problem["detail"]
    monkeypatch.setenv("SLIPWAY_DEBUG", "1")
    assert "Traceback" in slipway(*SERVE).err
    monkeypatch.delenv("SLIPWAY_DEBUG")
    (folders / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(folders / "file"))
    assert "SLIPWAY_DEBUG=1" in slipway(*SERVE).err


def test_a_request_is_read_from_a_file_or_an_answer_in_json_and_yaml(slipway, folders):
    answer = answer_of(slipway(*SERVE, "-o", "json"))
    request = folders / "request.yaml"
    request.write_text(yaml.safe_dump(answer.request.model_dump(mode="json")))
    (kept,) = plans_folder().iterdir()
    for source in (str(request), str(kept)):
        done = slipway("plan", "serve", "--from", source, "-o", "json")
        assert answer_of(done).id == answer.id
    broken = folders / "broken"
    broken.write_text("- a list")
    assert "must hold one object" in slipway("plan", "serve", "--from", str(broken)).err


def test_catalogs_are_listed_and_searched(slipway):
    rows = json.loads(slipway("models", "-o", "json").out)
    assert {"meta-llama/Llama-3.1-8B"} < {row["id"] for row in rows}
    found = slipway("models", "find", "llama 3.1 8B").out
    assert "meta-llama/Llama-3.1-8B" in found
    assert "8.03 B" in found
    assert "Qwen" not in found
    (h200,) = json.loads(slipway("devices", "find", "h200-sxm", "-o", "json").out)
    assert h200["memory_bytes"] > 140e9
    assert "GB/s" in slipway("devices").out
    for catalog, text, found in (
        ("models", "llama3.3", "meta-llama/Llama-3.1-70B"),  # whose alias is Llama-3.3-70B
        ("models", "llama3.3:70b", "meta-llama/Llama-3.1-70B"),
        ("devices", "rtx4090", "rtx-4090"),
        ("devices", "2x m2 8gb", "apple-m2-10gpu-8gb"),
    ):
        rows = json.loads(slipway(catalog, "find", text, "-o", "json").out)
        assert found in [row["id"] for row in rows], text


def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_figure(slipway, monkeypatch):
    figures = re.compile(r"\$?[\d,.]+ (?:GiB|GB/s|TFLOP/s)|\$[\d.]+")
    whole = set(figures.findall(slipway("devices", "find", "h200").out))
    for columns in (30, 50, 70):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = slipway("devices", "find", "h200").out
        assert max(map(len, shown.splitlines())) <= columns
        body, _, note = shown.partition("Not shown in")
        assert set(figures.findall(body)) <= whole, columns
        assert ("Price/h" in note) == (columns < 70)


def test_what_is_refused_or_missed_is_said_in_the_words_of_the_options(slipway):
    serve = ("plan", "serve", "qwen3-8b", "--on", "h100")
    for field, spec in (("cluster.foo", ClusterSpec), ("pins.prefill_devices", Strategy)):
        done = slipway(*serve, "--set", f"{field}=1")
        refused, _, named = done.err.partition("; nearest: ")
        assert (done.code, f"{field}: there is no such field" in refused) == (ExitCode.USAGE, True)
        assert {*named.strip().split(", ")} <= {*spec.model_fields}, field
    missed = slipway(*serve, "--ttft-p95", "1ms", "--concurrency", "1", "--engine", "vllm")
    assert missed.code == ExitCode.NOTHING_FITS
    assert re.search(r"it would with: TTFT p95 of [\d.]+ ms, the best found", missed.err)
    assert "ttft_p95_seconds" not in missed.err
    assert "1 concurrent request:" in missed.out


def test_a_plan_whose_interval_exceeds_the_memory_says_so_and_another_does_not(slipway):
    full = ("plan", "tune", "qwen3-8b", "--on", "8xa100", "--method", "full")
    for arguments, is_doubtful in ((full, True), (SERVE, False)):
        done = slipway(*arguments, "-o", "json")
        best = answer_of(done).plans[0]
        high = best.interval["per_device_peak_bytes"][1]
        assert (high > best.memory.capacity_bytes) == is_doubtful, arguments
        assert ("It may not fit: the interval" in slipway(*arguments).out) == is_doubtful, (
            arguments
        )


def test_a_terminal_of_ascii_gets_every_name_and_a_closed_pipe_no_traceback(folders):
    program = "import sys; from runners.cli.main import run; sys.exit(run())"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for shell in ('"$0" -c "$1" devices find h200', '"$0" -c "$1" devices | head -n 1'):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {shell}", sys.executable, program],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, shell
        assert done.stdout.isascii(), shell
        assert done.stdout, shell


def test_sizes_have_a_suitable_unit_and_api_lists_operations_alone(slipway):
    listed = slipway("api", "-o", "json")
    assert "list_jobs" in listed.out
    assert not {"paginate", "close"} & set(json.loads(listed.out))
    for name in ("paginate", "nosuch"):
        done = slipway("api", name)
        assert (done.code, "`slipway api` lists them" in done.err) == (ExitCode.USAGE, True), name
        assert "nearest: `" not in done.err


def test_no_command_offers_the_completion_that_is_a_command_of_its_own(slipway):
    for name in COMMANDS:
        assert "--install-completion" not in slipway(name, "--help").out, name


def test_the_formats_of_an_export_are_listed_all_or_of_a_plan(slipway):
    shown = slipway("export", "--list").out
    assert [name for name in FORMATS if not re.search(rf"^{name} ", shown, re.MULTILINE)] == []
    plan_id = answer_of(slipway(*SERVE, "-o", "json")).id
    of_plan = slipway("export", plan_id, "--list").out
    assert "vllm" in of_plan
    assert "torchtitan" not in of_plan
    for arguments, words in ((("export",), "PLAN is missing"), (("export", plan_id), "--to is")):
        done = slipway(*arguments)
        assert (done.code, words in done.err) == (ExitCode.USAGE, True)
    words = slipway("export", "--help").out
    assert [
        name for name in FORMATS if name.replace("_", ".") not in words.replace("_", ".")
    ] == []


def test_a_slow_command_shows_on_a_terminal_that_it_runs_and_a_fast_one_does_not(
    monkeypatch, capsys
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.progress("Searching"):
        pass
    assert capsys.readouterr().err == ""
    shown = threading.Event()
    monkeypatch.setattr(output, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr("rich.status.Status.start", lambda _: shown.set())
    with output.progress("Searching"):
        assert shown.wait(20)


class Ready(BaseHTTPRequestHandler):
    """A server whose /readyz answers with its status."""

    status = 200

    def do_GET(self):
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_doctor_checks_machine_configuration_and_server(slipway, folders, monkeypatch):
    done = slipway("doctor", "-o", "json")
    checks = {row["name"]: row for row in json.loads(done.out)}
    assert done.code == ExitCode.DONE
    assert {"Python", "Packages", "CPU", "GPU", "Memory", "Disk", "Server"} <= set(checks)
    assert "none: plans are made here" in checks["Server"]["words"]

    server = HTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = folders / "config" / "slipway" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'server = "http://127.0.0.1:{server.server_port}/"\ntoken = "slp_x"\n')
    config.chmod(0o600)
    assert re.search(r"Server +ok +http://\S+ is ready", slipway("doctor").out)
    monkeypatch.setattr(Ready, "status", 503)
    failed = slipway("doctor")
    assert (failed.code, failed.err.split(";")[0]) == (1, "slipway: failed: Server")
    server.shutdown()
    server.server_close()
    assert "does not answer" in slipway("doctor").out

    for text, words in (
        ('servr = "x"', "'servr'"), ("server = 5", "text in quotes"), ("server =", "as TOML"),
        ('server = "slipway.lan"', "https://slipway.example.org"),
    ):  # fmt: skip
        config.write_text(text)
        assert words in " ".join(slipway("doctor").out.split())
    config.write_text('token = "slp_x"')
    config.chmod(0o644)
    assert "chmod 600" in slipway("doctor").out
    monkeypatch.setenv("SLIPWAY_SERVER", "ftp://x")
    assert "ftp://x" in slipway("doctor").out


def in_process(*arguments, code="", **variables):
    """Run the program as a process of its own; ``code`` runs before it."""
    program = f"{code}\nimport sys; from runners.cli.main import run; sys.exit(run())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


LOADED = """
import atexit, sys
atexit.register(lambda: print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr))
"""


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("--help",), {"scipy", "numpy", "pydantic", "rich", "planner", "httpx", "torch", "django"}),
        (("plan", "--help"), {"scipy", "numpy", "planner", "rich", "httpx", "torch"}),
        (("plan", "serve", "--help"), {"scipy", "numpy", "yaml", "rich", "httpx", "torch"}),
        (("bench", "--help"), {"scipy", "numpy", "planner", "rich", "httpx", "torch"}),
        (SERVE, {"scipy", "httpx", "torch", "django", "celery", "psutil", "yaml"}),
    ],
)  # fmt: skip
def test_a_command_loads_no_more_than_it_needs(folders, arguments, absent):
    done = in_process(*arguments, code=LOADED)
    assert done.returncode == 0, done.stderr
    assert absent & set(done.stderr.split()) == set()


def test_help_names_every_command_and_completion_completes_names(
    slipway, folders, monkeypatch, capsys
):
    assert slipway("--version").out.startswith("slipway")
    assert (slipway().code, slipway("plan").code) == (2, 2)
    shown = slipway("--help").out
    for name in ("plan", "export", "explain", "models", "devices", "doctor", "completion"):
        assert re.search(rf"^  {name} ", shown, re.MULTILINE), name
    for shell in ("bash", "zsh", "fish"):
        assert "_SLIPWAY_COMPLETE" in slipway("completion", shell).out
    monkeypatch.setenv("HOME", str(folders))
    assert str(folders) in slipway("completion", "bash", "--install").out
    assert "slipway" in (folders / ".bashrc").read_text()
    monkeypatch.setenv("_SLIPWAY_COMPLETE", "complete_bash")
    for words, found in (
        ("slipway pl", {"plan"}),
        ("slipway plan s", {"serve"}),
        ("slipway plan serve Qwen3-8", {"Qwen3-8B"}),
        ("slipway plan serve x --on 8xh200-s", {"8xh200-sxm-141gb"}),
        ("slipway export x --to kub", {"kubernetes"}),
        ("slipway plan serve x --objective l", {"latency"}),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            slipway()
        assert found <= set(capsys.readouterr().out.split()), words


def test_another_tools_command_is_planned_and_each_setting_told(slipway, folders):
    (folders / "serve.sh").write_text("vllm serve llama-3.1-8b -tp 2 --max-model-len 8k --foo 1\n")
    done = slipway("plan", "--from", str(folders / "serve.sh"), "--on", "2xh100", "-o", "json")
    answer = json.loads(done.out)
    assert done.code == 0, done.err
    assert answer["request"]["pins"]["tensor_parallel_size"] == 2
    assert answer["request"]["workload"]["input_tokens"] == 1024  # the default of a goal
    assert "foo is not a setting of vLLM" in done.err
    (folders / "tune.yml").write_text("base_model: meta-llama/Llama-3.2-1B\nadapter: qlora\n")
    done = slipway("plan", "--from", str(folders / "tune.yml"), "--on", "rtx-4090", "-o", "json")
    assert json.loads(done.out)["request"]["workload"]["method"] == "qlora", done.err
    (folders / "tune.yml").write_text(
        "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 4\n"
    )
    for words, batch in (
        (("plan", "--from"), 16),  # micro-batch x accumulation x 2 ranks
        (("plan", "tune", "--batch-size", "32", "--dp", "4", "--on", "4xh100", "--from"), 32),
    ):
        on = () if "--on" in words else ("--on", "2xh100")
        done = slipway(*words, str(folders / "tune.yml"), *on, "-o", "json")
        assert done.code == 0, done.err
        request = json.loads(done.out)["request"]
        assert request["workload"]["global_batch_size"] == batch, words
        assert request["workload"]["method"] == "full", words
        assert "cluster.device" not in done.err, words
    done = slipway("plan", "--from", str(folders / "tune.yml"), "--batch-size", "8")
    assert (done.code, "slipway plan GOAL --from FILE --batch-size" in done.err) == (2, True)
    (folders / "other").write_text("rm -rf /\n")
    done = slipway("plan", "--from", str(folders / "other"))
    assert (done.code, done.out) == (2, "")
    assert slipway("plan", "--on", "h100").code == 2


def test_a_plan_says_itself_what_it_leaves_out_of_another_tools_text(slipway, folders):
    (folders / "grpo.sh").write_text(
        "accelerate launch --num_processes 8 trl/scripts/grpo.py --max_length 1024 --bf16 --foo 1 "
        "--model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size two\n"
    )
    said = ("--foo 1: foo is not a setting",
            "--per_device_train_batch_size two: 'two' is not used")  # fmt: skip
    for words in (("plan",), ("plan", "tune")):
        command = (*words, "--from", str(folders / "grpo.sh"), "--on", "8xa40")
        table, answer = slipway(*command), slipway(*command, "-o", "json")
        warnings = json.loads(answer.out)["plans"][0]["warnings"]
        assert "Train (grpo, full)" in table.out
        for each in said:
            assert each in " ".join(table.out.split()), (words, table.out)
            assert any(each in warning for warning in warnings), (words, warnings)
