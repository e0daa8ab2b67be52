"""Small hosts: the own runner as measured, ranks that share a processor, unified memory."""

import pytest

from planner.api import estimate
from planner.catalog.devices import get_device, unified_memory
from planner.catalog.engines import get_engine
from planner.cost.communication import all_reduce_seconds, ring_seconds
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.units import GIB
from planner.workload.setting import peak_of
from planner.workload.training_exchange import ROUNDING_BYTES, ROUNDINGS
from tests.planner.asking import TRAIN, ask

# The product's own runner on a CPU, held against what it measured there.
#
# Two quiet cores of an AMD EPYC (AMX), PyTorch 2.13, 2026-11-21; the device's rates are those
# of its own micro-benchmark on the same day.


MEASURED_HOST = {
    "id": "two-quiet-cores",
    "kind": "cpu",
    "memory_bytes": 25_276_502_016,
    "memory_bandwidth_bytes_per_second": 66.3e9,
    "peak_flops_per_second": {"fp32": 192.7e9, "bf16": 428.8e9, "int8": 739.1e9},
    "op_overhead_seconds": 2.62e-6,
    "runtime_overhead_bytes": 408_719_360,
    "provenance": "measured",
    "as_of": "2026-11-21",
}
DEMO = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def step_of(batch, compute):
    workload = {"kind": "train", "sequence_length": 256, "method": "pretrain"}
    return ask(
        model=DEMO,
        device=MEASURED_HOST,
        workload={**workload, "global_batch_size": batch},
        strategy={"compute_dtype": compute},
    )


@pytest.mark.parametrize(
    ("batch", "compute", "measured_seconds"),
    [
        pytest.param(2, "bf16", 0.0617, id="2-bf16"),
        pytest.param(8, "bf16", 0.1932, id="8-bf16"),
        pytest.param(2, "fp32", 0.0991, id="2-fp32"),
        pytest.param(8, "fp32", 0.2864, id="8-fp32"),
    ],
)
def test_a_measured_training_step_lies_in_its_interval(batch, compute, measured_seconds):
    low, high = step_of(batch, compute).interval["step_seconds"]
    assert low < measured_seconds < high


def test_a_processor_without_units_for_16_bits_trains_in_32():
    # Measured on such a processor: 6,296 to 11,826 tokens/s in fp32, 836 to 1,259 in bf16.
    slow = {**MEASURED_HOST, "peak_flops_per_second": {"fp32": 192.7e9, "bf16": 20e9}}
    workload = {
        "kind": "train", "sequence_length": 256, "method": "pretrain", "global_batch_size": 8
    }  # fmt: skip

    def found(**strategy):
        return ask(model=DEMO, device=slow, workload=workload, strategy=strategy)

    told = found(compute_dtype="bf16").performance.tokens_per_second
    assert found().performance.tokens_per_second > 3 * told
    llama_cpp = get_engine("llama_cpp", "cpu")
    device = DeviceSpec.model_validate(slow)
    assert peak_of(device, "bf16", ggml_kernels=llama_cpp.ggml_kernels) == (192.7e9, "fp32")


# PyTorch's own trainers with FSDP, which no fit has seen, in tokens per second of all devices:
# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 with torch.compile (its
# H100 have 96 GB and were limited to 500 W), and IBM's FSDP training of Llama 2 7B on 128 A100
# (pytorch.org/blog/maximizing-training, without recomputation).
@pytest.mark.parametrize(
    ("model", "device", "nodes", "tokens", "recomputation", "measured"),
    [
        ("meta-llama/Llama-3.1-8B", "h100-sxm-80gb", 1, 8192, "selective", 8 * 6667),
        ("meta-llama/Llama-3.1-8B", "h100-sxm-80gb", 16, 8192, "selective", 128 * 6514),
        ("meta-llama/Llama-2-7b-hf", "a100-sxm4-80gb", 16, 4096, "none", 128 * 3700),
    ],
)
def test_trainings_of_other_pytorch_trainers_are_predicted(
    model, device, nodes, tokens, recomputation, measured
):
    found = ask(
        model=model,
        cluster={
            "device": device, "devices_per_node": 8, "nodes": nodes,
            "inter_node_bandwidth_bytes_per_second": 50e9,  # 400 Gb/s for each device
        },
        workload={
            "kind": "train", "method": "pretrain",
            "sequence_length": tokens, "global_batch_size": 2 * 8 * nodes,
        },
        strategy={
            "data_parallel_size": 8 * nodes, "zero_stage": 3, "micro_batch_size": 2,
            "activation_recomputation": recomputation, "compute_dtype": "bf16",
        },
    )  # fmt: skip
    assert 0.9 < found.performance.tokens_per_second / measured < 1.1
    low, high = found.interval["tokens_per_second"]
    assert low < measured < high


def test_the_measured_peak_of_the_demos_training_lies_in_its_interval():
    # The demo job on the same quiet cores, libraries included; its text was tokenised before.
    host = {**MEASURED_HOST, "training_overhead_bytes": 101_056_000}
    workload = {"kind": "train", "sequence_length": 256, "method": "pretrain"}

    found = ask(
        model=DEMO,
        device=host,
        workload={**workload, "global_batch_size": 2},
        strategy={"compute_dtype": "bf16"},
    )
    low, high = found.interval["per_device_peak_bytes"]

    assert low < 645_554_176 < high


def test_products_in_8_bit_floats_are_emulated_where_no_unit_has_them():
    """Rounded operands are multiplied in fp32, and the output layer alone is copied to bf16."""
    wide, narrow = (step_of(2, compute) for compute in ("bf16", "fp8"))
    held = {name: each.memory.breakdown_bytes for name, each in (("w", wide), ("n", narrow))}

    assert any("products in fp8 are emulated: two-quiet-cores" in said for said in narrow.warnings)
    assert not any("emulated" in said for said in wide.warnings)
    assert narrow.performance.step_seconds > wide.performance.step_seconds
    assert held["n"]["buffers"] == 2 * 4096 * 192
    assert held["w"]["buffers"] > 2 * held["n"]["buffers"]
    for term in ("weights", "gradients", "optimizer_states", "activations"):
        assert held["n"][term] == held["w"][term]


def rounding_of(estimate):
    name = "Rounding operands to 8-bit floats"
    return next((one for one in estimate.terms if one.name == name), None)


def test_a_step_of_emulated_products_takes_the_rounding_of_its_operands_too():
    """On two cores of an AMD EPYC the demo's step took 2.3 times as long as bf16's."""
    wide, narrow = (step_of(2, compute) for compute in ("bf16", "fp8"))
    low, high = narrow.interval["step_seconds"]
    term = rounding_of(narrow)

    assert low < 2.3 * 0.0617 < high
    assert low < 2.52 * 0.0617 < high  # with other work beside it
    assert narrow.performance.step_seconds / wide.performance.step_seconds == pytest.approx(
        2.3, rel=0.1
    )
    assert term.value > 0.3 * narrow.performance.step_seconds
    assert (term.unit, term.operator_class) == ("s", "memory_bandwidth")
    operands = 512 * 4 * 3456 + 4 * (2 * 192 * 192 + 2 * 192 * 96 + 3 * 192 * 512)
    assert term.inputs[0].value == ROUNDING_BYTES * ROUNDINGS * operands
    assert rounding_of(wide) is None


def test_what_runs_again_rounds_its_inputs_and_matrices_again():
    for how, more in (("selective", 1), ("full", 4 / 3)):
        plain, again = (
            rounding_of(
                ask(
                    model=DEMO,
                    device=MEASURED_HOST,
                    workload={**TRAIN, "sequence_length": 256, "global_batch_size": 2},
                    strategy={"compute_dtype": "fp8", "activation_recomputation": kept},
                )
            ).value
            for kept in ("none", how)
        )

        assert again == pytest.approx(more * plain), (how, more)


def test_products_in_8_bit_floats_run_at_their_own_peak_where_units_have_them():
    workload = {"kind": "train", "sequence_length": 256, "method": "pretrain"}
    found = [
        ask(
            model="meta-llama/Llama-3.1-8B",
            device="h100-sxm5-80gb",
            engine="torch",
            workload={**workload, "global_batch_size": 16},
            strategy={"compute_dtype": compute},
        )
        for compute in ("bf16", "fp8")
    ]

    assert found[1].performance.step_seconds < found[0].performance.step_seconds
    assert not any("emulated" in said for said in found[1].warnings)
    assert rounding_of(found[1]) is None


def test_what_training_adds_is_not_charged_to_a_generation():
    host = {**MEASURED_HOST, "training_overhead_bytes": 10**9}
    generate = {"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 32}
    found = ask(model=DEMO, device=host, workload=generate)
    assert found.memory.breakdown_bytes["runtime_overhead"] == 408_719_360


@pytest.mark.parametrize(
    ("dtype", "measured_tpot"),
    [  # median over five repetitions of 32 tokens after a prompt of 128, one job each
        pytest.param("int8", 0.0068, id="int8"),
        pytest.param("int4", 0.0049, id="int4"),
    ],
)
def test_a_measured_decode_step_lies_in_its_interval(dtype, measured_tpot):
    found = ask(
        model=DEMO,
        device=MEASURED_HOST,
        workload={"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 32},
        strategy={"weight_dtype": dtype},
    )
    low, high = found.interval["tpot_seconds"]
    assert low < measured_tpot < high


CPU = DeviceSpec(
    id="host-x",
    kind="cpu",
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_second=2e10,
    peak_flops_per_second={"fp32": 1e11},
    op_overhead_seconds=2e-6,
    provenance="measured",
)
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def cluster(ranks=4, cores=2, latency=5e-3):
    shared = ClusterSpec(device=CPU).as_ranks_of_cpu(ranks, cores)
    fields = {
        "intra_node_bandwidth_bytes_per_second": 1e9,
        "collective_latency_seconds": latency,
        "hand_over_latency_seconds": latency / 2,
    }
    return shared.model_copy(update=fields)


def step(on=None, **strategy):
    fixed = {
        "micro_batch_size": 1, "weight_dtype": "fp32", "compute_dtype": "fp32",
        "activation_recomputation": "none", "attention": "eager",
    }  # fmt: skip
    asked = {
        "model": MODEL,
        "cluster": on or cluster(),
        "workload": {"kind": "train", "sequence_length": 64, "global_batch_size": 8},
        "engine": "torch",
        "strategy": {**fixed, **strategy},
    }
    return estimate(EstimateRequest.model_validate(asked)).performance.step_seconds


def test_ranks_of_a_measured_processor_have_their_part_of_every_rate():
    device = cluster().device
    assert device.peak_flops_per_second == {"fp32": 2.5e10}
    assert device.memory_bandwidth_bytes_per_second == 5e9
    assert device.memory_bytes == 2**32
    assert device.op_overhead_seconds == 4e-6  # two ranks take turns on each core
    assert cluster().ranks_per_core == 2

    shared = ClusterSpec(device=CPU).as_ranks_of_cpu(2, 8)
    assert shared.device.op_overhead_seconds == CPU.op_overhead_seconds
    assert shared.ranks_per_core == 1
    for device in ("h100-sxm-80gb", CPU.model_copy(update={"kind": "gpu"})):
        with pytest.raises(ValueError, match="it must be a single CPU with measured rates"):
            ClusterSpec(device=device).as_ranks_of_cpu(4, 2)


def test_an_all_reduce_is_two_passes_and_each_zero_stage_exchanges_more():
    ring = {"payload_bytes": 1e6, "ranks": 4, "link_bytes_per_s": 1e9, "latency_s": 1e-3}
    assert ring_seconds(**ring, ring_passes=2, starts=1) == all_reduce_seconds(**ring)
    assert ring_seconds(**ring | {"ranks": 1}, ring_passes=2, starts=1) == 0
    times = [step(data_parallel_size=4, zero_stage=stage) for stage in (1, 2, 3)]
    assert times == sorted(times)


def test_waits_of_ranks_slow_every_layout_and_fill_no_bubble():
    for strategy in (
        {"data_parallel_size": 4},
        {"data_parallel_size": 4, "zero_stage": 3},
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 4, "pipeline_schedule": "1f1b"},
    ):
        assert step(cluster(latency=1e-3), **strategy) < step(cluster(latency=1e-2), **strategy)

    pipeline = {"pipeline_parallel_size": 4, "pipeline_schedule": "1f1b"}
    own_cores = cluster().model_copy(update={"ranks_per_core": 1.0})
    assert step(cluster(), **pipeline) < 0.8 * step(own_cores, **pipeline)

    pipeline = {"pipeline_parallel_size": 4}
    woven = step(pipeline_schedule="zero_bubble", **pipeline)
    assert woven == step(pipeline_schedule="1f1b", **pipeline)


def test_few_weights_make_copies_first_and_many_weights_stages():
    copies = {"data_parallel_size": 4}
    stages = {
        "data_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "1f1b",
    }  # fmt: skip
    narrow = cluster().model_copy(update={"intra_node_bandwidth_bytes_per_second": 1e8})
    wide = cluster().model_copy(update={"intra_node_bandwidth_bytes_per_second": 1e11})
    assert step(narrow, **stages) < 0.8 * step(narrow, **copies)
    assert step(wide, **copies) < 1.1 * step(wide, **stages)


MB = 1e6


def device(vendor, gib, **fields):
    return DeviceSpec(
        id="unified",
        kind="uma",
        vendor=vendor,
        memory_bytes=round(gib * GIB),
        memory_bandwidth_bytes_per_second=1e11,
        peak_flops_per_second={"bf16": 1e13, "fp16": 1e13},
        **fields,
    )


# recommendedMaxWorkingSetSize of macOS 26, from llama.cpp's start of the log.
NEW_MACS = [
    (24, 19069.67 * MB),  # M4, and M5 of ggml-org benchmarks
    (32, 26800.60 * MB),  # M2 Max, M4, M5
    (36, 30150.67 * MB),
    (48, 40200.90 * MB),  # M4 Pro
    (64, 55662.79 * MB),  # M3 Max, M1 Max
    (128, 115448.73 * MB),  # M4 Max, M5 Max; 107.52 GiB in antirez/ds4 PR 893
    (256, 239e9),  # raullenchai/Rapid-MLX PR 183
    (512, 498216.21 * MB),  # M3 Ultra
]
# The same before macOS 26.
OLD_MACS = [
    (16, 11453.25 * MB),  # llama.cpp's own test logs
    (24, 17179.89 * MB),
    (32, 21845.34 * 2**20),  # ollama issue 434, llama.cpp PR 2011
    (64, 49152.00 * 2**20),  # llama.cpp issue 1870
    (96, 73728.00 * 2**20),  # llama.cpp issue 3213
]


def test_what_the_gpu_may_take_goes_by_vendor_system_and_what_is_given():
    for gib, logged in NEW_MACS:
        assert unified_memory(device("Apple", gib)).usable_bytes == pytest.approx(logged, rel=0.01)

    for gib, logged in OLD_MACS:
        assert unified_memory(device("Apple", gib)).assured_bytes == pytest.approx(
            logged, rel=0.001
        )

    for name, lowest, highest in (
        ("gb10-dgx-spark", 110, 121.69),  # CUDA shows 121.69 GiB
        ("jetson-agx-orin-64gb", 52, 61.4),
        ("strix-halo-395", 96, 96),  # the largest reservation of the firmware
        ("core-ultra-7-258v", 18, 18.5),  # IGCIT issue 1536: 18 of 32 GB
    ):
        assert lowest <= unified_memory(get_device(name)).usable_bytes / GIB <= highest

    for kind in ("gpu", "cpu", "accelerator"):
        own = device("NVIDIA", 80).model_copy(update={"kind": kind})
        assert unified_memory(own) is None, kind

    assert unified_memory(device("Qualcomm", 32)) is None
    mac = device("Apple", 16, usable_memory_ratio=0.95)
    assert ask(model="openai/gpt-oss-20b", device=mac.model_dump(), **GPT_OSS_20B).fits


QUESTION = {"kind": "serve", "input_tokens": 1024, "output_tokens": 128, "concurrency": 1}
GPT_OSS_20B = {
    "workload": QUESTION,
    "engine": "llama_cpp",
    "strategy": {"quantization": "gguf:4.1"},
}


def test_a_plan_of_11_gib_does_not_fit_a_mac_of_16():
    """The limit is 10.67 GiB: AlexsJones/llmfit PR 754, exo-explore/exo PR 1672."""
    mac = device("Apple", 16).model_dump()
    assert not ask(model="openai/gpt-oss-20b", device=mac, **GPT_OSS_20B).fits


def test_a_plan_of_100_gib_fits_a_mac_of_128_and_names_the_older_limit():
    """The limit is 107.52 GiB: antirez/ds4 PR 893."""
    found = ask(
        model="Qwen/Qwen3-235B-A22B",
        device="m4-max",
        workload={**QUESTION, "input_tokens": 2048},
        engine="llama_cpp",
        strategy={"quantization": "gguf:3.6"},
    )

    assert found.fits
    assert 96 < found.memory.per_device_peak_bytes / GIB < 107.52
    assert any("96.0 GiB before macOS 26" in warning for warning in found.warnings)


def test_a_mac_that_is_almost_full_is_warned_of():
    """osaurus-ai/osaurus PR 1958: 34.17 GiB of weights on 48 GB are paged out."""
    mac = device("Apple", 48).model_dump()
    tight = {"workload": QUESTION, "engine": "llama_cpp", "device": mac}
    found = ask(model="Qwen/Qwen3-32B", strategy={"quantization": "gguf:9.1"}, **tight)
    loose = ask(model="Qwen/Qwen3-32B", strategy={"quantization": "gguf:q4_k_m"}, **tight)
    assert found.fits
    assert any("other programs share this memory" in warning for warning in found.warnings)
    assert not any("other programs" in warning for warning in loose.warnings)
