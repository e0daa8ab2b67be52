"""Preflight checks of GPU environments: compute capability, driver, C compiler."""

import shutil
from collections.abc import Iterable, Iterator, Sequence

from runners import inventory
from runners.devices import amd
from runners.devices.visibility import (
    FP8_CAPABILITY,
    TRITON_CAPABILITY,
    cuda_of_driver,
    cuda_of_torch,
    rocm_of_torch,
)
from runners.environments.store import Pins, Version
from runners.facts import GpuFacts
from runners.messages import Needs, PreflightCheck, no, yes

# AMD's with FP8 matrix products (CDNA 3 and 4, RDNA 4), and without Triton (GCN).
AMD_FP8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")
AMD_WITHOUT_TRITON = ("gfx7", "gfx8", "gfx900", "gfx902", "gfx906")
COMPILERS = ("cc", "gcc", "clang")  # Triton compiles its kernel launchers with one of them


def checks(
    pins: Pins, library: inventory.Library | None, wanted: Sequence[str]
) -> Iterator[PreflightCheck]:
    """Yield the GPU checks of an environment; none if it needs no GPU.

    ``wanted``: uuids of the attempt's GPUs; empty: all GPUs.
    """
    if pins.cuda is None:
        return
    found = given(inventory.gpu_facts(library) if library else [], wanted)
    gpus = [gpu for gpu in found if gpu.vendor == "nvidia"]
    yield _gpu(pins, gpus, found)
    if library and gpus:
        yield driver_check(cuda_of_driver(library), pins.cuda, f"The environment {pins.name}")
    yield _compiler(pins)


def division_checks(
    pins: Pins, library: inventory.Library | None, needs: Needs
) -> Iterator[PreflightCheck]:
    """Yield whether split engines have enough GPUs and the package for KV cache transfer."""
    if needs.num_gpus:
        facts = list(inventory.gpu_facts(library)) if library else []
        allotted = [gpu for gpu in facts if not needs.gpus or gpu.uuid in needs.gpus]
        sentence = f"The job's engines take {needs.num_gpus} GPUs of their own"
        if len(allotted) < needs.num_gpus:
            yield no(
                "engines",
                f"{sentence}, and this host has {len(allotted)} for it.",
                f"Choose a host with {needs.num_gpus} free GPUs, or a plan without a split.",
            )
        else:
            yield yes("engines", f"{sentence}, and this host has them.")
    pinned = {line.partition("==")[0].lower() for line in pins.packages}
    if missing := [name for name in needs.packages if name not in pinned]:
        yield no(
            "transfer",
            f"The environment {pins.name} of this host pins no {', '.join(missing)[:200]}, over "
            "which the cache of a prompt travels from one engine to the other.",
            f"Add it to the host's own pins of {pins.name}, or remove that file: the shipped one "
            "has it.",
        )


def given(found: Iterable[GpuFacts], wanted: Sequence[str]) -> list[GpuFacts]:
    """Return the GPUs whose uuid is in ``wanted``; all if it is empty."""
    return [gpu for gpu in found if not wanted or gpu.uuid in wanted]


def usable(gpus: Sequence[GpuFacts]) -> Iterator[PreflightCheck]:
    """Yield a failed check where CUDA would not give the job the GPUs that it was given."""
    closed = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    if closed:
        named = ", ".join(f"GPU {gpu.index}" for gpu in closed)[:400]
        yield no(
            "compute mode",
            f"Computing on {named} is prohibited.",
            "Allow it on the host: nvidia-smi -c DEFAULT.",
        )
    waiting = [gpu for gpu in gpus if gpu.fabric_state not in (None, "completed")]
    if waiting:
        named = ", ".join(f"GPU {gpu.index} ({gpu.fabric_state})" for gpu in waiting)[:400]
        yield no(
            "NVSwitch",
            f"Not registered with the NVSwitches, so that CUDA does not start: {named}.",
            "Start the fabric manager on the host: systemctl start nvidia-fabricmanager.",
        )
    instances = [gpu for gpu in gpus if gpu.parent_uuid]
    if instances and len(gpus) > 1:
        named = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in instances)[:400]
        yield no(
            "MIG",
            f"A process gets one MIG instance and no GPU beside it; the job was given {len(gpus)} "
            f"GPUs, of which MIG instances are {named}.",
            "Give the job one device, or switch MIG off: nvidia-smi -mig 0.",
        )


def runtime_check(library: inventory.Library) -> PreflightCheck:
    """Check whether torch is built for the driver of the GPUs that jobs use."""
    if not amd.is_amdsmi(library):
        return driver_check(cuda_of_driver(library), cuda_of_torch())
    built, rocm = rocm_of_torch(), amd.rocm_version(library)
    if built is None:
        remedy = "Install a torch for ROCm on the host, as pytorch.org says."
        return no("driver", "torch is built without ROCm, so no GPU would be used.", remedy)
    here = f"; the host has ROCm {rocm}" if rocm else ""
    return yes("driver", f"torch is built with ROCm {built[0]}.{built[1]}{here}.")


def narrow_products(gpus: Sequence[GpuFacts]) -> PreflightCheck:
    """Check whether an attempt's GPUs support FP8 matrix products; CPUs emulate them."""
    minimum = _requirement(FP8_CAPABILITY, gpus, AMD_FP8)
    if not gpus:
        return yes(
            "fp8", "No GPU is used: products in 8-bit floats are emulated, which is slower."
        )
    too_old = _too_old(gpus, FP8_CAPABILITY)
    if not too_old:
        return yes("fp8", f"{len(gpus)} GPUs {minimum} multiply in 8-bit floats.")
    return no(
        "fp8",
        f"Products in 8-bit floats need GPUs {minimum}; {too_old}.",
        "Choose a host with newer GPUs, or train with products in BF16.",
    )


def block_attention(gpus: Sequence[GpuFacts]) -> PreflightCheck:
    """Check whether an attempt's GPUs can train with FlexAttention; CPUs cannot."""
    too_old = _too_old(gpus, TRITON_CAPABILITY)
    minimum = _requirement(TRITON_CAPABILITY, gpus, ("gfx908",))
    if gpus and not too_old:
        return yes("flex", f"{len(gpus)} GPUs {minimum} train with FlexAttention.")
    why = too_old or "processors have no backward pass of it"
    return no(
        "flex",
        f"FlexAttention trains on GPUs {minimum}; {why}.",
        "Choose a host with such GPUs, or the attention kernel Fused (SDPA).",
    )


def _gpu(pins: Pins, gpus: Sequence[GpuFacts], found: Sequence[GpuFacts]) -> PreflightCheck:
    least = pins.compute_capability or (0, 0)
    minimum = _requirement(least)
    if not gpus:
        why = (
            ", ".join(sorted({gpu.name for gpu in found}))
            or inventory.driver_problem()
            or "no NVIDIA driver and no NVIDIA GPU answer here"
        )
        cuda = f"{pins.cuda[0]}.{pins.cuda[1]}" if pins.cuda else ""
        return no(
            "GPU",
            f"The environment {pins.name} runs on NVIDIA GPUs {minimum}, with a driver for CUDA "
            f"{cuda}, and this host has none: {why[:200]}.",
            "Choose a host with such a GPU, or an engine that runs on processors: slipway, "
            "or llamacpp for GGUF files.",
        )
    too_old = _too_old(gpus, least)
    if not too_old:
        return yes("GPU", f"{len(gpus)} GPUs {minimum}, as {pins.name} needs.")
    return no(
        "GPU",
        f"The environment {pins.name} needs GPUs {minimum}; {too_old}.",
        "Choose a host with newer GPUs, or the engine slipway.",
    )


def _requirement(
    least: Version, gpus: Sequence[GpuFacts] = (), amd_names: Sequence[str] = ()
) -> str:
    if any(gpu.vendor == "amd" for gpu in gpus):
        return f"of architecture {' or '.join(amd_names)} or newer"
    return f"of compute capability {least[0]}.{least[1]} or newer"


def _too_old(gpus: Sequence[GpuFacts], least: Version) -> str:
    """Return a phrase naming the GPUs below a compute capability, or ""."""
    old = [gpu for gpu in gpus if _is_too_old(gpu, least)]
    named = ", ".join(
        f"{gpu.name} ({gpu.compute_capability or gpu.architecture or 'unknown'})" for gpu in old
    )
    return f"too old are {named[:400]}" if old else ""


def _is_too_old(gpu: GpuFacts, least: Version) -> bool:
    if gpu.vendor != "amd":
        return _capability(gpu) < least
    architecture = gpu.architecture or "unknown"
    if least == FP8_CAPABILITY:
        return architecture not in AMD_FP8
    return architecture.startswith((*AMD_WITHOUT_TRITON, "unknown"))


def _capability(gpu: GpuFacts) -> Version:
    major, _, minor = (gpu.compute_capability or "0.0").partition(".")
    return int(major), int(minor or 0)


def _compiler(pins: Pins) -> PreflightCheck:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler:
        return yes("compiler", f"A C compiler is {compiler}.")
    return no(
        "compiler",
        f"{pins.name} compiles kernels as it starts, and this host has none of "
        f"{', '.join(COMPILERS)}.",
        "Install a C compiler on the host, such as gcc.",
    )


def driver_check(
    driver: Version | None, built_with: Version | None, what: str = "torch"
) -> PreflightCheck:
    """Check whether the driver supports the CUDA version of torch or an environment.

    A driver supports all minor versions of its CUDA major version.

    Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility".
    """
    if built_with is None:
        remedy = "Install a torch with CUDA on the host, as pytorch.org says for its driver."
        return no("driver", "torch is built without CUDA, so no GPU would be used.", remedy)
    built = f"{what} is built with CUDA {built_with[0]}.{built_with[1]}"
    if driver is None:
        return no("driver", f"{built}, and the driver does not say what it runs.", _UPDATE)
    sentence = f"{built}; the driver runs up to {driver[0]}.{driver[1]}."
    if driver[0] >= built_with[0]:
        return yes("driver", sentence)
    return no("driver", sentence, _UPDATE)


_UPDATE = "Install a newer driver on the host, or a torch that is built for this one."
