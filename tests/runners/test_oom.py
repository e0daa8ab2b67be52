"""What programs really wrote when memory ran out, and which memory it was."""

import sys

import pytest

from runners.reasons import Reason
from runners.supervision import procfs
from runners.supervision.classification import Ending, classify
from tests.runners.tools import AttemptFolder, Attempts, bodies

MIB = 2**20

# Recorded: each text stands in the thread beside it.
DEVICE = {
    # github.com/murong-xu/CADS/issues/4
    "torch": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has "
    "a total capacity of 31.47 GiB of which 12.73 GiB is free. Including non-PyTorch memory, this "
    "process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB is allocated by "
    "PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated.",
    # github.com/wxian3/NeuroLens/issues/2
    "torch before 2.5": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 "
    "GiB. GPU 0 has a total capacty of 12.00 GiB of which 9.02 GiB is free.",
    # github.com/OPIXray-author/OPIXray/issues/5
    "torch 1": "RuntimeError: CUDA out of memory. Tried to allocate 264.00 MiB (GPU 0; 2.00 GiB "
    "total capacity; 788.51 MiB already allocated; 145.93 MiB free; 1.02 GiB reserved in total)",
    # github.com/ollama/ollama/issues/6860
    "llama.cpp": "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144.00 MiB on device 4: "
    "cudaMalloc failed: out of memory\nggml_gallocr_reserve_n: failed to allocate CUDA4 buffer",
    # github.com/ollama/ollama/issues/9782
    "runtime": "Error: llama runner process has terminated: CUDA error: out of memory",
    # github.com/vllm-project/vllm/issues/10439
    "vllm": "ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization` when initializing the engine.",
}
MAIN = {
    # github.com/mxfold/mxfold2/issues/20
    "torch": "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: "
    "can't allocate memory: you tried to allocate 132426121216 bytes. Error code 12 (Cannot "
    "allocate memory)",
    # github.com/MaximeVandegar/Papers-in-100-Lines-of-Code/issues/10
    "torch elsewhere": "RuntimeError: [enforce fail at alloc_cpu.cpp:81] data. "
    "DefaultCPUAllocator: not enough memory: you tried to allocate 1981808640 bytes.",
    # tokenizers 0.23.3 in the demo's first phase, under job_memory_bytes of 680 MiB
    "rust": "memory allocation of 4456464 bytes failed\nnote: run with `RUST_BACKTRACE=1`",
    # github.com/hyperhq/hyperd/issues/130
    "errno": "os::commit_memory(0x00000000c5330000, 181207040, 0) failed; error='Cannot allocate "
    "memory' (errno=12)",
}


@pytest.mark.parametrize("text", DEVICE.values(), ids=DEVICE)
def test_a_device_that_ran_out_is_told_from_the_host(text):
    assert classify(Ending(1, None, text)) is Reason.OOM_GPU


@pytest.mark.parametrize("text", MAIN.values(), ids=MAIN)
def test_main_memory_that_ran_out_is_told_from_a_device(text):
    assert classify(Ending(1, None, text)) is Reason.OOM_HOST


@pytest.mark.parametrize(
    "text",
    ["ValueError: memory_bytes must be positive", "the cache holds 3 blocks", "out of range"],
)
def test_talk_of_memory_is_no_end_of_it(text):
    assert classify(Ending(1, None, text)) is Reason.EXIT_NONZERO


# Said here and now, by the libraries that are installed


def run(attempts: Attempts, *, code: str, memory_limit_bytes: int) -> AttemptFolder:
    """Run a job under a limit; a busy machine may need a minute to import torch."""
    folder = attempts.start(code=code, memory_limit_bytes=memory_limit_bytes)
    attempts.wait(folder, seconds=180)
    return folder


ALLOCATORS = {
    "torch": "import torch; torch.zeros(2**40)",
    "numpy": "import numpy; numpy.ones(2**40)",
    "python": "bytearray(2**42)",
}


@pytest.mark.parametrize("code", ALLOCATORS.values(), ids=ALLOCATORS)
def test_what_the_installed_libraries_say_is_understood(attempts, code):
    folder = run(attempts, code=code, memory_limit_bytes=2048 * MIB)

    assert folder.exit_record().reason is Reason.OOM_HOST


TAKE_IT_ALL = """
import torch
held = []
while True:
    held.append(torch.ones(32 * 2**20, dtype=torch.uint8))
"""


def test_a_job_that_takes_more_than_its_limit_fails_at_its_own_allocation(attempts):
    folder = run(attempts, code=TAKE_IT_ALL, memory_limit_bytes=1024 * MIB)
    ended = folder.exit_record()

    assert (ended.exit_code, ended.signal, ended.reason) == (1, None, Reason.OOM_HOST)
    assert "DefaultCPUAllocator: can't allocate memory" in ended.last_lines[-1]
    assert 512 * MIB < ended.peak_rss_bytes < 2048 * MIB


def test_the_limit_binds_every_process_of_the_job(attempts):
    code = f"import subprocess, sys; sys.exit(subprocess.call({[sys.executable, '-c', 'bytearray(2**31)']!r}))"

    folder = run(attempts, code=code, memory_limit_bytes=512 * MIB)

    assert folder.exit_record().reason is Reason.OOM_HOST
    assert procfs.marked(folder.attempt_id) == []


def test_a_job_below_its_limit_does_not_notice(attempts):
    folder = run(attempts, code="print(len(bytearray(2**20)))", memory_limit_bytes=512 * MIB)

    assert folder.exit_record().reason is Reason.OK
    assert bodies(folder, "exited")[0]["conditions"]["memory_available_bytes"] > 0
