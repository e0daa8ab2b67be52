"""What programs really wrote when a GPU, its driver or a collective failed, and which rank."""

import signal

import pytest

from runners.reasons import Reason
from runners.supervision.classification import Ending, classify, rank_of
from runners.supervision.output import LAST_BYTES, LastLines

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
    (
        Reason.GPU_FAULT,
        None,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
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


@pytest.mark.parametrize(("reason", "rank", "text"), RECORDED)
def test_a_recorded_message_names_its_cause_and_its_rank(reason, rank, text):
    assert classify(Ending(1, None, text)) is reason
    assert rank_of(text) == rank


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
        assert last.text == text[-LAST_BYTES:]
        assert classify(Ending(code, None, last.text, longer_text=last.longer_text)) is reason
    assert classify(Ending(None, signal.SIGABRT, frames, longer_text=WATCHDOG)) is (
        Reason.NCCL_TIMEOUT
    )
