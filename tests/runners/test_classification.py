"""Why an attempt ended, by its exit, by recorded messages, and how the machine was."""

import signal
import sys
import time

from runners.shared.messages import EndConditions
from runners.shared.reasons import Reason
from runners.supervision import classification, procfs
from runners.supervision.classification import Ending, classify, rank_of
from runners.supervision.output import LAST_BYTES, LastLines
from tests.runners.tools import AttemptFolder, Attempts, bodies

# Why an attempt ended: one code for each cause, first match wins.


def test_a_clean_exit_a_stop_a_missing_program_and_a_signal_explain_an_end():
    assert classify(Ending(0, None, "warning: CUDA out of memory was caught")) is Reason.OK
    ending = Ending(None, signal.SIGKILL, "No space left", Reason.STOPPED_BY_USER)
    assert classify(ending) is Reason.STOPPED_BY_USER
    assert classify(Ending(None, None, "", is_exec_failure=True)) is Reason.ENGINE_START_FAILED
    assert classify(Ending(None, signal.SIGSEGV, "")) is Reason.SIGNAL


def test_the_last_words_of_a_failed_job_name_the_cause():
    for text, reason in [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried", Reason.OOM_GPU),
        ("OSError: [Errno 28] No space left on device", Reason.DISK_FULL),
        ("OSError: [Errno 122] Disk quota exceeded: '/m'", Reason.DISK_FULL),
        ("x\nMODEL_OR_DATA_MISSING: no model in /m\n", Reason.MODEL_OR_DATA_MISSING),
        ("x\nBAD_INPUT: m.safetensors is cut off; copy it again\n", Reason.BAD_INPUT),
        ("x\nDISK_FULL: No space left on device: 0 bytes\n", Reason.DISK_FULL),
        ("he said BAD_INPUT: or so", Reason.EXIT_NONZERO),
        ("Traceback ...\nValueError: no", Reason.EXIT_NONZERO),
    ]:
        assert classify(Ending(1, None, text)) is reason, (text, reason)


def test_a_kill_counts_as_memory_only_when_the_kernel_counted_one_and_a_killed_rank_as_killed():
    killed = Ending(None, signal.SIGKILL, "")
    assert classify(killed) is Reason.KILLED_EXTERNALLY
    assert classify(killed._replace(has_oom_kill=True)) is Reason.OOM_HOST
    killed = Ending(1, None, REPORT.format(code=-9))
    assert classify(killed) is Reason.KILLED_EXTERNALLY
    assert classify(killed._replace(has_oom_kill=True)) is Reason.OOM_HOST
    assert classify(killed._replace(last_text=REPORT.format(code=1))) is Reason.RANK_LOST
    told = f"x\nDISK_FULL: no space\n{killed.last_text}"
    assert classify(killed._replace(last_text=told)) is Reason.DISK_FULL


REPORT = """RANK_LOST: rank 0 of 2: Connection closed by peer
============================================================
runners.jobs.train FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : north
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
"""


# What programs really wrote when a GPU, its driver or a collective failed, and which rank.

# Recorded: each text stands in the thread or the page beside it.
# github.com/XPixelGroup/BasicSR/issues/737
WATCHDOG = (
    "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
    "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
)
# github.com/hiyouga/LlamaFactory/issues/8261
FRAME = (
    "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration"
    "<long, std::ratio<1l, 1000l> > >) + 0x23d (0x7fe131825a1d in torch/lib/libtorch_cuda.so)\n"
)
TAKEN_DOWN = (
    "[rank2]:[E602 11:18:53.865680143 ProcessGroupNCCL.cpp:684] [Rank 2] Some NCCL operations "
    "have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
    "operations might run on corrupted/incomplete data.\n"
)
# github.com/huggingface/picotron_tutorial/issues/6
ABORTED = """Root Cause (first observed failure):
[0]:
  time      : 2025-05-01_11:12:35
  host      : 472a4389fceb
  rank      : 3 (local_rank: 3)
  exitcode  : -6 (pid: 3431)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 3431
"""
# github.com/murong-xu/CADS/issues/4
OOM = "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.\n"
RECORDED = [
    (Reason.NCCL_TIMEOUT, 1, WATCHDOG),
    (Reason.NCCL_TIMEOUT, None, FRAME),
    # github.com/argonne-lcf/Megatron-DeepSpeed, its notes on 25 April 2024
    (
        Reason.NCCL_TIMEOUT,
        25,
        (
            "[rank25]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 25] Heartbeat monitor timed out! "
            "Process will be terminated after dumping debug info. workMetaList_.size()=2"
        ),
    ),
    (Reason.NCCL_ERROR, 2, TAKEN_DOWN),
    # github.com/vllm-project/vllm/issues/10523
    (
        Reason.NCCL_ERROR,
        None,
        (
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
            "ProcessGroupNCCL.cpp:1333, unhandled system error (run with NCCL_DEBUG=INFO for "
            "details), NCCL version 2.18.1"
        ),
    ),
    # github.com/NVIDIA/nccl/issues/1657
    (Reason.NCCL_ERROR, None, "RuntimeError: NCCL error: unhandled system error"),
    # github.com/pytorch/pytorch/issues/111187, comment of 14 February 2024
    (
        Reason.RANK_LOST,
        None,
        (
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
            "ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error, NCCL "
            "version 2.19.3"
        ),
    ),
    # github.com/vllm-project/vllm/issues/5222
    (Reason.GPU_FAULT, None, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    # github.com/wilicc/gpu-burn/issues/1
    (
        Reason.GPU_FAULT,
        None,
        "[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.",
    ),
    # docs.nvidia.com/deploy/xid-errors: 31 is a page fault of the program
    (Reason.KERNEL_FAILED, None, "NVRM: Xid (PCI:0000:02:00): 31, pid=7, name=python, Ch 0000001"),
    # github.com/hpcaitech/Open-Sora/issues/694
    (
        Reason.KERNEL_FAILED,
        None,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    # github.com/ROCm/legacy-rocm-build/issues/5742
    (
        Reason.KERNEL_FAILED,
        None,
        (
            "torch.AcceleratorError: HIP error: an illegal memory access was encountered\n"
            "Search for `hipErrorIllegalAddress' in https://rocm.docs.amd.com/projects/HIP"
        ),
    ),
    # github.com/ROCm/legacy-rocm-build/issues/4554
    (
        Reason.KERNEL_FAILED,
        None,
        (
            "Memory access fault by GPU node-1 (Agent handle: 0x1f829860) on address 0x7a8a4be00000. "
            "Reason: Page not present or supervisor privilege.\nAborted (core dumped)"
        ),
    ),
    # github.com/NVIDIA/nvidia-docker/issues/1168
    (
        Reason.GPU_DRIVER_MISMATCH,
        None,
        "Failed to initialize NVML: Driver/library version mismatch",
    ),
    # github.com/lllyasviel/Fooocus/issues/1313
    (
        Reason.GPU_DRIVER_MISMATCH,
        None,
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    # github.com/Comfy-Org/ComfyUI/issues/10326
    (
        Reason.GPU_DRIVER_MISMATCH,
        None,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    (Reason.SIGNAL, 3, ABORTED),
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp logs its options at every start
    (Reason.EXIT_NONZERO, 0, "[rank0]:[I ProcessGroupNCCL.cpp:1] TIMEOUT(ms): 600000\nValueError"),
    # github.com/IEIT-Yuan/Yuan-2.0/issues/65: a warning of a computation on the CPU
    (
        Reason.EXIT_NONZERO,
        None,
        (
            "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found "
            "version 11000).\nValueError: no"
        ),
    ),
]


def test_a_recorded_message_names_its_cause_and_its_rank():
    wrong = [
        (expected, found, text)
        for *expected, text in RECORDED
        if (found := [classify(Ending(1, None, text)), rank_of(text)]) != expected
    ]
    assert not wrong, wrong


def test_an_abort_is_explained_by_what_stood_before_the_frames_of_its_ranks():
    frames = "frame #2: <unknown function> + 0xdbbf4 (0x7fe1217efbf4 in libstdc++.so.6)\n" * 800
    aborted = signal.SIGABRT + 128
    endings = {
        (1, f"{WATCHDOG}{frames}{ABORTED}"): Reason.NCCL_TIMEOUT,
        (aborted, f"{WATCHDOG}{frames}"): Reason.NCCL_TIMEOUT,
        (1, f"{OOM}{frames}{WATCHDOG}"): Reason.OOM_GPU,  # the others waited for the one without
        (aborted, frames): Reason.SIGNAL,
        (1, f"{OOM}caught, and tried again\n{frames}ValueError: no\n"): Reason.EXIT_NONZERO,
    }
    for (code, text), reason in endings.items():
        last = LastLines()
        for at in range(0, len(text), 999):
            last.feed(text[at : at + 999].encode())
        assert text.endswith(f"\n{last.text}")  # it begins with a line
        assert LAST_BYTES - len(frames) // 800 * 2 < len(last.text) <= LAST_BYTES
        assert classify(Ending(code, None, last.text, longer_text=last.longer_text)) is reason
    assert classify(Ending(None, signal.SIGABRT, frames, longer_text=WATCHDOG)) is (
        Reason.NCCL_TIMEOUT
    )


# What programs really wrote when memory ran out, and which memory it was.

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


def test_memory_that_ran_out_is_told_by_whose_it_was():
    for text in DEVICE.values():
        assert classify(Ending(1, None, text)) is Reason.OOM_GPU, text
    for text in MAIN.values():
        assert classify(Ending(1, None, text)) is Reason.OOM_HOST, text
    for text in [
        "ValueError: memory_bytes must be positive",
        "the cache holds 3 blocks",
        "out of range",
    ]:
        assert classify(Ending(1, None, text)) is Reason.EXIT_NONZERO, text


# Said here and now, by the libraries that are installed


def run(attempts: Attempts, *, code: str, memory_limit_bytes: int) -> AttemptFolder:
    """Run a job under a limit; a busy machine may need a minute to import torch."""
    folder = attempts.start(code=code, memory_limit_bytes=memory_limit_bytes)
    attempts.wait(folder, seconds=180)
    return folder


def test_what_numpy_and_python_say_is_understood(attempts):
    for name, code in {
        "numpy": "import numpy; numpy.ones(2**40)",
        "python": "bytearray(2**42)",
    }.items():
        limit = {"memory_limit_bytes": 2048 * MIB}
        folder = attempts.run(f"{name}-{attempts.first_id}", code=code, **limit)
        assert folder.exit_record().reason is Reason.OOM_HOST, name


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
    assert procfs.processes_of_attempt(folder.attempt_id) == []


def test_a_job_below_its_limit_does_not_notice(attempts):
    folder = run(attempts, code="print(len(bytearray(2**20)))", memory_limit_bytes=512 * MIB)
    assert folder.exit_record().reason is Reason.OK
    assert bodies(folder, "exited")[0]["conditions"]["memory_available_bytes"] > 0


# How the machine was at the end: read from files that any of may be hidden.

# Records of /dev/kmsg: level, number, microseconds since boot, flags; text (kernel, dev-kmsg).
XID = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus."
LOG = f"""6,1200,5000000,-;usb 1-1: new device
4,1201,90000000,-;{XID}
 SUBSYSTEM=pci
4,1202,120000000,-;NVRM: Xid (PCI:0000:44:00): 48, pid=4242, Double Bit ECC Error
"""


def test_this_machines_conditions_are_what_the_wire_carries(tmp_path):
    found = EndConditions.model_validate(classification.read(tmp_path, time.monotonic()))
    assert found.memory_available_bytes > 2**20
    assert found.disk_free_bytes > 2**20
    assert found.load >= 0


def test_the_drivers_reports_since_the_start_are_kept_and_earlier_ones_are_not(tmp_path):
    (tmp_path / "kmsg").write_text(LOG)
    found = list(classification.xids(tmp_path / "kmsg", since_monotonic_s=60.0))
    assert found == [
        "Xid 79 on PCI:0000:44:00: GPU has fallen off the bus.",
        "Xid 48 on PCI:0000:44:00: pid=4242, Double Bit ECC Error",
    ]
    assert len(list(classification.xids(tmp_path / "kmsg", since_monotonic_s=100.0))) == 1


def test_a_hidden_or_damaged_kernel_log_is_no_report(tmp_path):
    assert list(classification.xids(tmp_path / "absent", 0.0)) == []
    for text in ["", "no record", "4,1;NVRM: Xid (x): 1, y", "\x00\xff"]:
        (tmp_path / "kmsg").write_text(text, encoding="latin-1")
        assert list(classification.xids(tmp_path / "kmsg", 0.0)) == [], text


def test_the_hottest_sensor_is_told_where_there_is_one(tmp_path):
    for number, milli_degrees in enumerate((41_000, 67_500)):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "temp").write_text(f"{milli_degrees}\n")
    assert classification._hottest(tmp_path) == 67.5
    assert classification._hottest(tmp_path / "none") is None
