"""Unified memory: what the GPU may take, by vendor and size, against logged limits."""

import pytest

from planner.catalog.devices import GIB, get_device, unified_memory
from planner.specs.cluster import DeviceSpec
from tests.planner.asking import ask

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


@pytest.mark.parametrize(("gib", "logged"), NEW_MACS)
def test_macs_with_the_current_system(gib, logged):
    assert unified_memory(device("Apple", gib)).usable_bytes == pytest.approx(logged, rel=0.01)


@pytest.mark.parametrize(("gib", "logged"), OLD_MACS)
def test_macs_with_an_older_system(gib, logged):
    assert unified_memory(device("Apple", gib)).assured_bytes == pytest.approx(logged, rel=0.001)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("gb10-dgx-spark", 110, 121.69),  # CUDA shows 121.69 GiB
        ("jetson-agx-orin-64gb", 52, 61.4),
        ("strix-halo-395", 96, 96),  # the largest reservation of the firmware
        ("core-ultra-7-258v", 18, 18.5),  # IGCIT issue 1536: 18 of 32 GB
    ],
)
def test_other_unified_memories(name, lowest, highest):
    assert lowest <= unified_memory(get_device(name)).usable_bytes / GIB <= highest


@pytest.mark.parametrize("kind", ["gpu", "cpu", "accelerator"])
def test_memory_of_its_own_has_no_such_limit(kind):
    own = device("NVIDIA", 80).model_copy(update={"kind": kind})

    assert unified_memory(own) is None


def test_an_unknown_vendor_and_a_given_share_keep_what_is_given():
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
