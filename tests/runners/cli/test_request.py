"""What arguments mean: the request that they make, the hardware, the quantities."""

import doctest
import json

import pytest

from planner.catalog.devices import MeasuredRates, get_device, list_devices, list_instances
from runners.cli import output, plan_request, quantities
from runners.cli.errors import CliError
from runners.cli.hardware import parse_hardware
from runners.cli.plan_request import answer_of, build_document, read_model, request_of
from runners.cli.quantities import count, duration, length, rate, share, size, value_of_field

H100 = get_device("h100").id
LLAMA = "meta-llama/Llama-3.1-8B"
LLAMA_405B = "meta-llama/Llama-3.1-405B"


def document_of(goal, *, on=("h100",), settings=(), **options):
    return build_document(goal, "llama-3.1-8b", options, hardware=on, settings=settings).document


@pytest.mark.parametrize(
    ("goal", "options", "field", "value"),
    [
        ("serve", {"input_len": "4k"}, "workload.input_tokens", 4000),
        ("serve", {"concurrency": "64"}, "workload.concurrency", 64),
        ("serve", {"rate": "300/min"}, "workload.request_rate_per_second", 5.0),
        ("serve", {"ttft": "1.5s"}, "workload.ttft_slo_seconds", 1.5),
        ("serve", {"ttft_p95": "500ms"}, "constraints.ttft_p95_seconds.max", 0.5),
        ("serve", {"itl_p99": "30ms"}, "constraints.tpot_p99_seconds.max", 0.03),
        ("serve", {"max_model_len": "128Ki"}, "workload.max_request_tokens", 131_072),
        ("serve", {"max_model_len": "16K"}, "workload.max_request_tokens", 16_384),
        ("tune", {"seq_len": "4K"}, "workload.sequence_length", 4096),
        ("train", {"seq_len": "4k"}, "workload.sequence_length", 4000),
        ("serve", {"prefix_share": "30%"}, "workload.prefix_share_ratio", 0.3),
        ("serve", {"kv_cache_dtype": "fp8"}, "pins.kv_cache_dtype", "fp8"),
        ("serve", {"tensor_parallel_size": "1"}, "pins.tensor_parallel_size", 1),
        ("serve", {"quantization": "awq"}, "pins.quantization", "awq"),
        ("serve", {"objective": "latency"}, "objective", "latency"),
        ("serve", {"max_quality_loss": "1%"}, "constraints.quality_loss_ratio.max", 0.01),
        ("generate", {"batch_size": "8"}, "workload.batch_size", 8),
        ("tune", {}, "workload.method", "lora"),
        ("tune", {"method": "qlora", "lora_rank": "32"}, "workload.lora_rank", 32),
        ("train", {}, "workload.method", "pretrain"),
        ("train", {"tokens": "15B"}, "workload.tokens", 15_000_000_000),
        ("train", {"time_budget": "8h"}, "workload.time_budget_seconds", 28_800.0),
        ("compress", {"method": "awq", "bits": "4"}, "workload.bits", 4),
        ("compress", {"calibration_tokens": "0"}, "workload.calibration_tokens", 0),
        ("compress", {"calibration_tokens": "128K"}, "workload.calibration_tokens", 128_000),
        ("tune", {"zero_stage": "0"}, "pins.zero_stage", 0),
        ("tune", {"optimizer": "adamw_torch"}, "workload.optimizer", "adamw"),
    ],
)  # fmt: skip
def test_an_option_sets_its_field_of_the_request(goal, options, field, value):
    request = request_of(document_of(goal, **options)).model_dump(mode="json")
    for name in field.split("."):
        request = request[name]
    assert request == value


def test_defaults_are_named_and_only_one_kind_of_arrival_is_given():
    made = build_document("serve", "llama-3.1-8b", {"output_len": "64"}, hardware=["h100"])
    assert made.document["workload"] == {
        "kind": "serve", "input_tokens": 1024, "output_tokens": 64, "concurrency": 16,
    }  # fmt: skip
    assert made.assumed == (
        "input tokens 1,024 (--input-len)", "concurrency 16 (--concurrency)",
        "engine auto: the engines that sites run, compared (--engine)",
    )  # fmt: skip
    assert made.document["model"] == LLAMA
    split = build_document("serve", "llama-3.1-8b", {}, hardware=["64xh200"])
    assert split.document["cluster"]["nodes"] == 8
    assert split.assumed[0].startswith("64xh200 as 8 nodes of 8")
    for options in ({"rate": "5"}, {"burst": "5"}, {"concurrency": "max"}):
        assert "concurrency" not in document_of("serve", **options)["workload"]
    settings = ["workload.concurrency=null"]
    assert "concurrency" not in document_of("serve", settings=settings)["workload"]
    for goal in ("serve", "generate", "tune", "compress"):
        compared = goal in {"serve", "generate"}
        assert document_of(goal).get("engine") == ("auto" if compared else None), goal
    assert document_of("serve", engine="sglang")["engine"] == "sglang"


def test_a_models_name_states_its_quantisation_and_a_missing_path_is_said(tmp_path):
    def made(model, **options):
        return build_document("serve", model, options, hardware=["4090"])

    gguf = made("hf.co/unsloth/Qwen3-8B-GGUF:Q5_K_M")
    assert gguf.document["model"] == "Qwen/Qwen3-8B"
    assert gguf.document["pins"] == {"quantization": "gguf:q5_k_m"}
    assert gguf.document["engine"] == "llama_cpp"
    assert "gguf:q5_k_m, as MODEL states (--quantization)" in gguf.assumed
    assert "llama.cpp's own" in made("unsloth/Qwen3-8B-GGUF").assumed[0]
    assert made("unsloth/Qwen3-8B-GGUF", quantization="q8_0").document["pins"] == {
        "quantization": "q8_0"
    }
    assert made("https://huggingface.co/Qwen/Qwen3-8B").document["model"] == "Qwen/Qwen3-8B"
    for model, options, words in (
        ("qwen3:8b-q8_0", {"quantization": "awq"}, "--quantization is 'awq', but .* gguf:q8_0"),
        ("/nonexistent/config.json", {}, "this path is not there"),
        ("./model.json", {}, "this path is not there"),
        (str(tmp_path), {}, "a folder without a config.json"),
        ("llama-99", {}, "no model"),
    ):
        with pytest.raises(CliError, match=words):
            made(model, **options)


def test_a_k_of_a_length_is_said_and_a_large_k_is_1024(capsys):
    for path, text, value in (
        ("--seq-len", "8K", 8192), ("--seq-len", "4096", 4096), ("--seq-len", "1M", 10**6),
    ):  # fmt: skip
        assert length(path, text) == value
        assert capsys.readouterr().err == ""
    assert length("--max-model-len", "8k") == 8000
    assert capsys.readouterr().err == "--max-model-len 8k is 8,000 tokens; 8K is 8,192\n"
    assert value_of_field("workload.max_request_tokens", "16K") == 16_384
    assert value_of_field("workload.tokens", "2K") == 2000


def test_defaults_are_those_of_the_situation():
    def workload(goal, model, on, **options):
        return build_document(goal, model, options, hardware=[on]).document["workload"]

    for on, concurrency in (
        ("m2 8gb", 1), ("4090 laptop", 1), ("cpu-ryzen-7950x", 1), ("4090", 16), ("8xh100", 16),
    ):  # fmt: skip
        assert workload("serve", "llama-3.1-8b", on)["concurrency"] == concurrency, on
    for model, on, options, sequences in (
        ("llama-3.1-8b", "h100", {}, 16),
        ("llama-3.1-8b", "8xh100", {}, 128),
        ("llama-3.1-8b", "64xh200", {}, 1024),  # Llama 2 7B's 4M tokens in sequences of 4,096
        ("llama-3.1-8b", "1024xh200", {}, 1024),
        ("llama-3.1-8b", "64xh200", {"seq_len": "8K"}, 512),
        ("llama-3.1-405b", "1024xh100", {}, 2048),  # Llama 3's 16M tokens in sequences of 8,192
        ("deepseek-ai/DeepSeek-V3", "2048xh800", {}, 15_360),
        ("gpt2", "8xh100", {}, 128),  # of 1,024 tokens, its context
        ("gpt2", "8xh100", {"batch_size": "32"}, 32),
    ):
        made = workload("train", model, on, **options)
        assert made["global_batch_size"] == sequences, (model, on, options)
    assert workload("train", "gpt2", "h100")["sequence_length"] == 1024
    for on, sequences in (("8xh100", 16), ("64xh100", 64), ("512xh100", 128)):
        assert workload("tune", "gpt2", on)["global_batch_size"] == sequences, on


def test_a_default_of_the_situation_says_its_reason():
    def assumed(goal, model, on):
        return "; ".join(build_document(goal, model, {}, hardware=[on]).assumed)

    for goal, model, on, words in (
        ("train", "llama-3.1-405b", "1024xh100",
         "global batch size 2,048: 17M tokens as Llama 3 405B, arXiv:2407.21783"),
        ("train", "llama-3.1-405b", "1024xh100",
         "sequence length 8,192: as Llama 3 405B was trained (--seq-len)"),
        ("train", "gpt2", "h100", "sequence length 1,024: the model's context (--seq-len)"),
        ("train", "gpt2", "h100", "global batch size 16: 16 a device, up to 0.52M tokens as GPT-3"),
        ("tune", "gpt2", "64xh100", "global batch size 64: one a device, 128 at most"),
        ("tune", "gpt2", "h100", "global batch size 16 (--batch-size)"),
        ("serve", "llama-3.1-8b", "m2 8gb", "concurrency 1: one person's machine (--concurrency)"),
    ):  # fmt: skip
        assert words in assumed(goal, model, on), (goal, on)


def test_a_405b_pre_training_without_options_is_as_fast_as_the_best_published_one():
    """NVIDIA/dgxc-benchmarking llama3.1/README_405b.md: bf16 on 1,152 H100, TP 8 PP 9 CP 2.

    504 sequences of 8,192 tokens take 17.52 s; the utilisation counts causal attention.
    """
    flops_per_token = 6 * 405.85e9 + 6 * 126 * 16384 * 8192
    published = 504 * 8192 / 17.52 / 1152 * flops_per_token / 989e12
    request = request_of(build_document("train", LLAMA_405B, {}, hardware=["1024xh100"]).document)

    best = answer_of(request).plans[0]

    assert best.performance.mfu == pytest.approx(published, rel=0.1)


def test_a_run_ends_by_its_tokens_or_its_time_and_both_are_refused():
    with pytest.raises(CliError, match="--tokens and --time-budget are both given"):
        document_of("train", tokens="10B", time_budget="3d")
    base = {"workload": {"kind": "train", "tokens": 10}, "model": "openai-community/gpt2"}
    made = build_document("train", None, {"time_budget": "1h"}, base=base, hardware=["h100"])
    assert made.document["workload"] == {"kind": "train", "time_budget_seconds": 3600.0}


def test_a_setting_reaches_every_field_and_a_wrong_one_is_named_with_the_nearest():
    document = document_of(
        "serve",
        on=("h100", "4xh200"),
        settings=[
            "cluster.host_memory_bytes=1TiB", "constraints.ttft_seconds.max=200ms", "top=3",
            'pins.speculative={"draft_model": "Qwen/Qwen3-0.6B"}',
        ],
    )  # fmt: skip
    request = request_of(document)
    assert [each.host_memory_bytes for each in request.hardware_options] == [2**40, 2**40]
    assert request.constraints["ttft_seconds"].max == 0.2
    assert (request.top, request.pins.speculative.draft_model) == (3, "Qwen/Qwen3-0.6B")
    for setting, field, words in (
        ("workload.imput_tokens=5", "workload.imput_tokens", "input_tokens"),
        ("workload.input_tokens=-1", "workload.input_tokens", "greater than 0"),
        ("workload.kind=dance", "workload", "serve"),
        ("objective=speed", "objective", "throughput"),
        ("top=NaN", "top", "valid integer"),
        ("max_request_tokens=5", "max_request_tokens", "nearest: workload.max_request_tokens"),
        ("workload.max_request_tokens=9", "workload.max_request_tokens", "is 9, less than"),
        ("workload=5", "workload", "must be an object"),
        ("constraints.UNKNOWN.max=1s", "constraints.UNKNOWN", "no such figure of an estimate"),
        ("constraints.ttft_second.max=1", "constraints.ttft_second", "nearest: ttft_seconds"),
        ("cluster.device.memory_bytes=1", "cluster.device.memory_bytes", "has no fields"),
        ("model.hidden_size=1", "model.hidden_size", "has no fields; give it whole"),
    ):
        with pytest.raises(CliError) as refused:
            request_of(document_of("serve", settings=[setting]))
        assert refused.value.field.startswith(field), setting
        assert words in str(refused.value), setting


def test_a_request_from_a_file_takes_the_place_of_defaults_and_options_win(tmp_path):
    base = {
        "model": "Qwen/Qwen3-8B",
        "cluster": {"device": "a100", "devices_per_node": 4},
        "workload": {"kind": "serve", "input_tokens": 10, "output_tokens": 5},
    }
    made = build_document("serve", None, {"output_len": "7"}, base=base)
    assert made.document == {**base, "workload": {**base["workload"], "output_tokens": 7}}
    assert made.assumed == ()
    other = build_document("serve", "llama-3.1-8b", {}, base=base, hardware=["2xh100"]).document
    assert other["cluster"] == {"device": H100, "devices_per_node": 2, "nodes": 1}
    assert "hardware_options" not in build_document(
        "serve", None, {}, base={**base, "hardware_options": ["aws/p5.48xlarge"]}, hardware=["h100"]
    ).document  # fmt: skip
    rented = build_document("serve", None, {}, base={**base, "cluster": "aws/p5.48xlarge"})
    assert rented.document["cluster"] == {"instance": "aws/p5.48xlarge"}
    with pytest.raises(CliError, match=r"workload\.kind is 'serve'"):
        build_document("train", None, {}, base=base)


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("h100", {"device": H100}),
        ("8xh100", {"device": H100, "devices_per_node": 8, "nodes": 1}),
        ("h100x8", {"device": H100, "devices_per_node": 8, "nodes": 1}),
        ("2x8xh100", {"device": H100, "devices_per_node": 8, "nodes": 2}),
        (
            "2 \u00d7 RTX 4090",
            {"device": get_device("rtx-4090").id, "devices_per_node": 2, "nodes": 1},
        ),
        ("aws/p5.48xlarge", {"instance": "aws/p5.48xlarge"}),
        ("4xaws/p5.48xlarge", {"instance": "aws/p5.48xlarge", "nodes": 4}),
        ("4090,ram=32GB", {"device": "rtx-4090", "host_memory_bytes": 32 * 10**9}),
    ],
)
def test_hardware_is_devices_nodes_or_a_cloud_offer(text, cluster):
    assert parse_hardware(text) == cluster


def test_every_name_of_the_catalogs_is_itself_and_its_count_may_stand_before():
    for device in list_devices():
        assert parse_hardware(device.id) == {"device": device.id}
        assert parse_hardware(f"4x{device.id}")["device"] == device.id
    for instance in list_instances():
        assert parse_hardware(instance.id) == {"instance": instance.id}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xh1000", "nearest: .*h100"),
        ("0xh100", "1 or more"),
        ("2x8xaws/p5.48xlarge", "2xaws/p5.48xlarge"),
        ("lab", "slipway devices find"),
        ("h100,rom=3", "after a comma it takes ram=SIZE"),
        ("h100,ram=3", "it has no unit"),
    ],
)
def test_unknown_hardware_is_refused_with_the_nearest_names_and_the_forms(text, words):
    with pytest.raises(CliError, match=words):
        parse_hardware(text)


def test_this_machine_is_its_cpu_with_rates_that_are_kept(folders, monkeypatch):
    monkeypatch.setattr("runners.cli.hardware._gpus", tuple)
    monkeypatch.setattr("runners.cli.hardware.load_per_core", lambda: 0.0)
    first = parse_hardware("this")
    device = first["device"]
    assert (device["kind"], device["provenance"]) == ("cpu", "measured")
    assert device["peak_flops_per_second"]["fp32"] > 1e9
    assert device["memory_bandwidth_bytes_per_second"] > 1e8
    assert parse_hardware("this") == first
    (kept,) = folders.rglob("this-machine.json")
    assert json.loads(kept.read_text())["device"] == device
    assert kept.stat().st_mode & 0o777 == 0o600


def test_rates_of_a_busy_machine_are_measured_again_and_shown_with_age_and_load(
    folders, slipway, monkeypatch
):
    monkeypatch.setattr("runners.cli.hardware._gpus", tuple)
    bandwidths = iter(range(1, 9))

    def measured():
        return MeasuredRates(next(bandwidths) * 1e9, {"fp32": 1e12}, "a test")

    monkeypatch.setattr("runners.cli.hardware.measure_cpu", measured)

    def rates(load):
        monkeypatch.setattr("runners.cli.hardware.load_per_core", lambda: load)
        device = parse_hardware("this")["device"]
        return device["memory_bandwidth_bytes_per_second"] / 1e9, device["source"]

    def checked(*options):
        rows = json.loads(slipway("doctor", *options, "-o", "json").out)
        return next((row["state"], row["words"]) for row in rows if row["name"] == "CPU rates")

    assert checked()[1].startswith("not measured")
    assert rates(load=3.0) == (1, "a test, at a load of 3.0 on each core")
    state, words = checked()
    assert (state, "1 GB/s" in words, "a load of 3.0" in words) == ("note", True, True)
    assert rates(load=4.0)[0] == 1  # as busy as then
    assert rates(load=0.1) == (2, "a test")
    assert rates(load=0.0)[0] == 2
    state, words = checked("--measure")
    assert (state, words.startswith("3 GB/s, 1,000 GFLOP/s")) == ("ok", True)


def test_this_machines_gpu_is_the_catalogs_with_the_drivers_memory(folders, monkeypatch):
    from runners.shared.facts import GpuFacts

    def gpus(name):
        return lambda: tuple(
            GpuFacts(index=index, uuid=str(index), name=name, memory_bytes=79 * 2**30)
            for index in range(2)
        )

    monkeypatch.setattr("runners.cli.hardware._gpus", gpus("NVIDIA H100 80GB HBM3"))
    cluster = parse_hardware("this")
    assert (cluster["device"]["id"], cluster["devices_per_node"]) == ("h100-sxm5-80gb", 2)
    assert cluster["device"]["memory_bytes"] == 79 * 2**30
    monkeypatch.setattr("runners.cli.hardware._gpus", gpus("NVIDIA Unheard 9000"))
    with pytest.raises(CliError, match="'NVIDIA Unheard 9000' is not in the catalog"):
        parse_hardware("this")


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (duration, "500ms", 0.5), (duration, "2 min", 120.0), (duration, "1e-3s", 0.001),
        (size, "80GB", 80 * 10**9), (size, "24Gi", 24 * 2**30),
        (count, "1,024", 1024), (count, "1.5T", 1_500_000_000_000), (count, "1e9", 10**9),
        (rate, "5/s", 5.0), (share, "0.25", 0.25),
    ],
)  # fmt: skip
def test_quantities_are_read_with_their_units(read, text, value):
    assert read("--x", text) == value


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (duration, "500", "has no unit"), (duration, "5 weeks", "'weeks' is not known"),
        (duration, "-5ms", "above 0"), (duration, "soon", "not a number"),
        (size, "24", "has no unit"), (count, "1.5", "whole number"), (count, "0", "above 0"),
        (count, "nan", "not a number"), (duration, "1,5s", "not a number"), (rate, "5/day", "not known"), (share, "130%", "0 to 1"),
    ],
)  # fmt: skip
def test_a_wrong_quantity_names_option_value_and_form(read, text, words):
    with pytest.raises(CliError, match=words) as refused:
        read("--x", text)
    assert f"--x is {text!r}" in str(refused.value)


def test_a_settings_value_is_json_a_quantity_of_its_field_or_text():
    for path, text, value in (
        ("top", "3", 3), ("id", '"3"', "3"), ("workload.tokens", "2M", 2_000_000),
        ("pins.fused_norms", "true", True), ("pins.kv_cache_dtype", "fp8", "fp8"),
        ("constraints.tpot_p95_seconds.max", "30ms", 0.03), ("cluster.disk_capacity_bytes", "2TB", 2 * 10**12),
        ("workload.prefix_share_ratio", "30%", 0.3), ("workload.request_rate_per_second", "300/min", 5.0),
        ("workload.calibration_tokens", "128K", 128_000), ("cluster.disk_bandwidth_bytes_per_second", "2GB/s", "2GB/s"),
    ):  # fmt: skip
        assert value_of_field(path, text) == value


def test_the_examples_of_docstrings_hold():
    for module, least in ((quantities, 6), (output, 6), (plan_request, 1)):
        done = doctest.testmod(module)
        assert (done.failed, done.attempted >= least) == (0, True), module


def test_a_model_is_planned_by_any_address_of_its_repository(own_hub, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", own_hub.url)
    for text, name in {
        "acme/tiny": "acme/tiny",
        "hf.co/acme/tiny": "acme/tiny",
        "https://huggingface.co/acme/tiny/tree/main": "acme/tiny@main",
        "ms://acme/tiny": "ms://acme/tiny",
        "https://modelscope.cn/models/acme/tiny/files": "ms://acme/tiny",
    }.items():
        found = read_model(text)
        assert (found.name, found.config["hidden_size"]) == (name, 64), text
    for text, words in {
        "ms://acme/none": "secret MODELSCOPE_API_TOKEN",
        "s3://bucket/tiny": "for `slipway models push`",
        "./acme/tiny": "this path is not there",
    }.items():
        with pytest.raises(CliError, match=words):
            read_model(text)
