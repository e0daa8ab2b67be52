"""Which GPUs a process sees, by the published rules of CUDA and of ROCm."""

import pytest

from runners.devices.visibility import (
    CudaDevice,
    cuda_selected,
    cuda_visible,
    is_order_known,
    rocm_visible,
)

GPUS = [CudaDevice(f"GPU-{digit}932f937-d72c", place) for place, digit in enumerate("8887")]
GPUS[1] = CudaDevice("GPU-8aaaa937-d72c", 1)
GPUS[2] = CudaDevice("GPU-8bbbb937-d72c", 2)
INSTANCES = [
    CudaDevice("GPU-11111111-d72c", 0, name="H100"),
    CudaDevice("MIG-aa", 1, is_instance=True, path="MIG-GPU-2222-d72c/1/0"),
    CudaDevice("MIG-ab", 1, is_instance=True, path="MIG-GPU-2222-d72c/2/0"),
]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,1", [2, 1]),
        (" 2 , 1 ", [2, 1]),
        ("0,2,-1,1", [0, 2]),  # the list ends at the first invalid entry
        ("2,9,1", [2]),
        ("1gpu2,2ampere", [1, 2]),  # read as strtoul does
        ("0,1,0", []),  # repeated: an error
        ("GPU-8bbbb937-d72c,GPU-7932f937-d72c", [2, 3]),
        ("GPU-8b,GPU-7", [2, 3]),  # enough digits to tell
        ("GPU-7,GPU-8", [3]),  # not enough: three begin so
        ("GPU-7,GPU-793", []),
        ("GPU-7,1", [3]),  # entries of one kind
        ("1,GPU-7", [1]),
        ("MIG-aa", []),
    ],
)
def test_cuda_selects_whole_gpus(value, seen):
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    assert cuda_visible(GPUS, env) == cuda_selected(GPUS, env) == seen


@pytest.mark.parametrize(
    ("value", "selected", "visible"),
    [
        (None, [0, 1, 2], [1]),  # one instance, and no GPU beside it
        ("0", [0], [0]),
        ("1", [1], [1]),  # the first instance of that GPU
        ("MIG-ab", [2], [2]),
        ("MIG-aa,MIG-ab", [1, 2], [1]),
        ("MIG-GPU-2222-d72c/2/0", [2], [2]),  # as drivers before R470 name it
        ("GPU-2222", [1], [1]),
        ("MIG-a", [], []),  # a MIG UUID is written in full
        ("2", [], []),
    ],
)
def test_cuda_gives_a_process_one_mig_instance(value, selected, visible):
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    assert cuda_selected(INSTANCES, env) == selected
    assert cuda_visible(INSTANCES, env) == visible


@pytest.mark.parametrize(
    ("names", "order", "is_known"),
    [
        (["A", "A"], None, True),
        (["A", "B"], None, False),
        (["A", "B"], "FASTEST_FIRST", False),
        (["A", "B"], "PCI_BUS_ID", True),
    ],
)
def test_cudas_own_order_is_known_only_among_equals_or_by_bus(names, order, is_known):
    devices = [CudaDevice(name, place, name=name) for place, name in enumerate(names)]

    assert is_order_known(devices, {"CUDA_DEVICE_ORDER": order} if order else {}) is is_known


UUIDS = ["GPU-8af705259683161c", "GPU-8bc1284879207f2b", "GPU-dc91284879207f2b"]


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "seen"),
    [
        (None, None, None, [0, 1, 2]),
        ("", None, None, []),
        ("2,0", None, None, [2, 0]),
        ("0x2", None, None, [2]),  # read as strtol does
        ("0,GPU-DC91284879207F2B", None, None, [0, 2]),
        ("gpu-dc", None, None, [2]),
        ("GPU-8,0", None, None, []),  # two begin so
        ("2,2,1", None, None, [2]),  # a repeated one ends the list
        ("1,0gpu", None, None, [1]),
        (None, "1", None, [1]),
        (None, "", "1", [1]),  # empty is unset
        (None, "", "", [0, 1, 2]),
        (None, "0,0,2", None, [0, 2]),  # a repeated one is left out
        (None, "2,-1,1", None, [2]),
        (None, "GPU-8bc1284879207f2b", None, [1]),
        (None, "2", "0", [2]),
        ("2,1", "1", None, [1]),  # HIP counts what ROCR left
        ("2,1", "2", None, []),
        ("2,1", None, "0", [2]),
        ("2", "GPU-8af705259683161c", None, []),
    ],
)
def test_rocr_selects_first_and_hip_among_the_rest(rocr, hip, cuda, seen):
    given = {
        "ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip, "CUDA_VISIBLE_DEVICES": cuda,
    }  # fmt: skip

    env = {name: value for name, value in given.items() if value is not None}

    assert rocm_visible(UUIDS, env) == seen
