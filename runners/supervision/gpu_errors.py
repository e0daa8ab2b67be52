"""Patterns of the errors of GPUs, their drivers and collectives, and the rank of one.

``tests/runners/test_gpu_errors.py`` has a real message of each, with its source. Standard library
only.
"""

import re

# Memory, NVLink or PCIe of the GPU: the driver's Xid errors that are not the program's, by the
# "XID Errors" catalogue (docs.nvidia.com/deploy/xid-errors), and the runtime's own messages.
FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error"
    r"|hardware stack error"
    r"|fallen off the bus"
    r"|\bGPU is lost\b"
    r"|\bXid \(PCI:[^)]*\): (46|48|62|63|64|74|79|92|94|95|110|119|120|136|140|143|155|156|158)\b"
    r"|HW Exception by GPU node.*(GPU Hang|RAS|ECC)"
)
# A kernel of the program: a wrong address, an index out of range, a failed assertion.
KERNEL = re.compile(
    r"(CUDA|HIP) error: (an illegal (memory access|instruction)|misaligned address"
    r"|device-side assert|unspecified launch failure|invalid program counter"
    r"|the launch timed out|operation not supported on global/shared address space)"
    r"|Memory access fault by GPU node"
    r"|HSA_STATUS_ERROR_(EXCEPTION|MEMORY_APERTURE_VIOLATION|ILLEGAL_INSTRUCTION)"
    r"|\bXid \(PCI:[^)]*\): (13|31|43|45)\b"
)
# torch also warns of an old driver where it only computes on the CPU: an error, not the warning.
MISMATCH = re.compile(
    r"Driver/library version mismatch"
    r"|Error: The NVIDIA driver on your system is too old"
    r"|CUDA driver version is insufficient for CUDA runtime version"
    r"|no kernel image is available for execution on the device"
    r"|system has unsupported display driver / cuda driver combination"
    r"|system not yet initialized"
)
# torch.distributed's watchdog, which aborts the process, and the frames of its abort.
NCCL_TIMEOUT = re.compile(
    r"NCCL(?! INFO)[^(\n]*\btimeout\b(?!\()"
    r"|Watchdog caught collective"
    r"|Heartbeat monitor timed out"
    r"|ProcessGroupNCCL's watchdog got stuck"
    r"|ProcessGroupNCCL::WorkNCCL::checkTimeout",
    re.IGNORECASE,
)
PEER_LOST = re.compile(r"remote process exited or there was a network error")
NCCL = re.compile(
    r"NCCL [Ee]rror\b.*(unhandled (system|cuda) error|internal error|invalid (argument|usage))"
    r"|Some NCCL operations have failed or timed out"
)
# torchrun's report of the rank that failed first.
ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n){1,6}? +exitcode +: (-?\d+) ", re.MULTILINE
)
_RANK = (
    re.compile(
        r"^Root Cause \(first observed failure\):\n(?:.*\n){1,4}? +rank +: (\d+) ", re.MULTILINE
    ),
    re.compile(r"\[Rank (\d+)\] Watchdog caught"),
    re.compile(r"\bRank (\d+)\] (?:Heartbeat|ProcessGroupNCCL)"),
    re.compile(r"^\[rank(\d+)\]:", re.MULTILINE),
)


def rank_of(text: str) -> int | None:
    """Return the rank that reported its failure first, None if the text names none.

    In a timeout it is a rank that waited: the one that did not come has reported nothing.
    """
    found = (pattern.search(text) for pattern in _RANK)
    return next((int(each[1]) for each in found if each), None)
