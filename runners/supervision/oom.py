"""Patterns of out-of-memory messages, for GPU and host memory. Standard library only.

``tests/runners/test_oom.py`` has a real message of each library, with its source.
"""

import re

# torch (CUDA, ROCm, XPU, MPS), the CUDA runtime, cuBLAS, llama.cpp, vLLM, JAX.
GPU = re.compile(
    r"(CUDA|HIP|XPU|MPS backend) out of memory"
    r"|torch(\.cuda)?\.OutOfMemoryError"
    r"|CUDA error: out of memory"
    r"|cudaMalloc failed: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
    r"|No available memory for the cache blocks"
    r"|KV cache is needed, which is larger than the available KV cache memory"
    r"|RESOURCE_EXHAUSTED: Out of memory"
)
# torch's CPU allocator, numpy, Python, the C++ and Rust libraries, the kernel.
HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|^(\w+\.)*_?(Array)?MemoryError\b"
    r"|std::bad_alloc"
    r"|memory allocation of \d+ bytes failed"
    r"|Cannot allocate memory",
    re.MULTILINE,
)
