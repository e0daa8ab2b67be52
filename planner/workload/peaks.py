"""Peak rates of devices, with fallbacks for formats that a device lacks."""

from planner.errors import BadRequestError
from planner.specs.base import Dtype
from planner.specs.cluster import DeviceSpec

CONSUMER_FALLBACK: dict[Dtype, tuple[Dtype, ...]] = {
    "fp32": (),
    "tf32": ("fp32",),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "nvfp4": ("fp8", "bf16", "fp16", "fp32"),
    "mxfp4": ("fp8", "bf16", "fp16", "fp32"),
    "int4": ("int8", "bf16", "fp16", "fp32"),
}


def peak_of(device: DeviceSpec, dtype: Dtype) -> tuple[float, Dtype]:
    """Return the device's dense peak for a dtype or the nearest wider one that it supports.

    Raises:
        BadRequestError: the device has no peak at all.
    """

    def rate(name: Dtype) -> float:
        return device.peak_flops_per_second.get(name, 0.0)

    for candidate in (dtype, *CONSUMER_FALLBACK.get(dtype, ("bf16", "fp16", "fp32"))):
        if candidate in device.peak_flops_per_second:
            wider = max(CONSUMER_FALLBACK.get(candidate, ()) or (candidate,), key=rate)
            best = max(
                candidate, wider, key=rate
            )  # skip narrow units that are slower than wide ones
            return rate(best), best
    if device.peak_flops_per_second:
        widest = next(iter(device.peak_flops_per_second))
        return device.peak_flops_per_second[widest], widest
    raise BadRequestError(
        f"device {device.id} has no peak_flops_per_second: nobody published one; "
        "give the device as an object with the rate of at least one dtype",
        "cluster.device.peak_flops_per_second",
    )
