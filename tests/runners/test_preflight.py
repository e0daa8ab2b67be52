"""What a host looks at before it claims: this machine as it is, and GPUs in NVML's shape."""

import importlib.metadata
import shutil
import socket
import subprocess
import sys
import types

import psutil
import pytest

from planner.specs.units import GIB
from runners.devices.topology import cuda_of_driver, cuda_of_torch
from runners.host import inventory, preflight
from runners.host.preflight import HostState, driver_check, run_checks
from runners.jobspec import ArtefactModel, FolderModel
from runners.shared.config import HostConfig
from runners.shared.messages import Needs, PreflightCheck
from runners.supervision import procfs
from tests.runners.test_machine import recorded_nvml

UUID = "GPU-5b5f4dd2-0000"
EVERYWHERE = {"kind", "packages", "disk", "memory"}


@pytest.fixture
def place(host_dir) -> HostState:
    return HostState(host_dir, HostConfig(), (host_dir.models,))


def checked(needs: Needs, place: HostState) -> dict[str, PreflightCheck]:
    return {check.name: check for check in run_checks(needs, place)}


def test_this_machine_is_fit_for_a_small_job_of_a_kind_that_it_runs(place):
    found = checked(Needs(kind="train", memory_bytes=2**20), place)
    assert set(found) >= EVERYWHERE
    assert [check.sentence for check in found.values() if not check.ok] == []
    check = checked(Needs(kind="teleport"), place)["kind"]
    assert (check.ok, "train, compress, evaluate, benchmark" in check.sentence) == (False, True)


def test_more_memory_than_there_is_names_both_figures_and_the_gap(place):
    needed = psutil.virtual_memory().total + GIB
    check = checked(Needs(kind="train", memory_bytes=needed), place)["memory"]
    assert not check.ok
    assert check.figures["needed_bytes"] == needed > check.figures["available_bytes"] > 0
    assert check.remedy.startswith("Free ")


def test_a_job_that_compiles_is_told_whether_there_is_a_compiler(place, monkeypatch):
    for path in ["/usr/bin:/bin", "/nowhere"]:
        monkeypatch.setenv("PATH", path)
        is_there = shutil.which("g++") is not None
        check = checked(Needs(kind="generate", compiles=True), place)["compiler"]
        assert check.ok == is_there, path
        assert "g++" in (check.sentence if is_there else check.remedy), path


def test_a_full_disk_says_what_is_short_for_a_job_and_for_an_environment(host_dir):
    strict = HostState(host_dir, HostConfig(min_free_bytes=2**60), (host_dir.models,))
    check = checked(Needs(kind="train"), strict)["disk"]
    assert (check.ok, "min_free_bytes" in check.remedy) == (False, True)
    tight = HostState(host_dir, HostConfig(min_free_bytes=2**60), (host_dir.models,))
    check = checked(Needs(kind="serve", environment="llamacpp"), tight)["environment"]
    assert not check.ok
    assert check.remedy.startswith("Free ")
    assert check.figures["needed_bytes"] > check.figures["free_bytes"] > 0


def test_a_dtype_asks_for_its_library_and_a_missing_package_is_named(place, monkeypatch):
    check = checked(Needs(kind="compress", weight_dtype="int8"), place)["packages"]
    assert f"torchao {importlib.metadata.version('torchao')}" in check.sentence
    trl = Needs(kind="train", environment="trl", weight_dtype="int4")
    assert checked(trl, place)["environment"].ok
    monkeypatch.setattr(preflight, "PACKAGES", ("torch", "no-such-distribution"))
    refused = checked(trl, place)["environment"]
    assert (refused.ok, refused.sentence) == (False, "Not installed here: no-such-distribution.")
    check = checked(Needs(kind="train"), place)["packages"]
    assert (check.ok, check.sentence) == (False, "Not installed here: no-such-distribution.")


def test_a_model_is_looked_for_below_the_roots(place, host_dir):
    (host_dir.models / "llama").mkdir()
    check = checked(Needs(kind="benchmark", model=FolderModel(path="llama")), place)["model"]
    assert check.ok
    for model in [
        FolderModel(path="mistral"),
        FolderModel(path="/etc"),
        ArtefactModel(attempt_id="gone"),
    ]:
        assert not checked(Needs(kind="benchmark", model=model), place)["model"].ok, model


def test_a_teacher_is_looked_for_beside_the_model(place, host_dir):
    (host_dir.models / "llama").mkdir()
    for path, is_there in (("llama", True), ("mistral", False)):
        needs = Needs(
            kind="train", model=FolderModel(path="llama"), teacher=FolderModel(path=path)
        )
        found = checked(needs, place)
        assert found["model"].ok, path
        assert found["teacher"].ok == is_there, path
        assert found["teacher"].sentence.startswith("Teacher: "), path


def test_a_port_that_somebody_listens_on_is_taken_and_a_free_one_passes(place):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = checked(Needs(kind="train", ports=(port,)), place)["ports"]
    assert (check.ok, str(port) in check.sentence) == (False, True)
    with socket.socket() as asked:
        asked.bind(("", 0))
        port = asked.getsockname()[1]
    assert checked(Needs(kind="train", ports=(port,)), place)["ports"].ok


# GPUs: NVML's recorded shape stands where no GPU is


def with_gpus(monkeypatch, num_gpus: int = 1, driver: int = 12040) -> types.SimpleNamespace:
    library = recorded_nvml(num_gpus)
    library.nvmlSystemGetCudaDriverVersion_v2 = lambda: driver
    library.nvmlShutdown = lambda: None
    monkeypatch.setattr(inventory, "_initialised_nvml", lambda: library)
    return library


def test_the_fullest_of_its_gpus_decides(place, monkeypatch):
    library = with_gpus(monkeypatch, 2)
    full = types.SimpleNamespace(total=80 * GIB, used=79 * GIB)
    empty = types.SimpleNamespace(total=80 * GIB, used=0)
    library.nvmlDeviceGetMemoryInfo = lambda index: full if index else empty
    check = checked(Needs(kind="train", memory_bytes=2 * GIB), place)["GPU memory"]
    assert not check.ok
    assert check.sentence.startswith("GPU 1, the fullest, has 1.00 GiB free")


def test_only_the_gpus_that_it_was_given_are_looked_at_and_a_gone_one_is_named(place, monkeypatch):
    with_gpus(monkeypatch, 4)
    gpus = preflight.gpus_of(Needs(kind="train", gpus=(UUID,)), recorded_nvml(4))
    assert [gpu.uuid for gpu in gpus] == [UUID]
    with_gpus(monkeypatch)
    check = checked(Needs(kind="train", gpus=(UUID, "GPU-gone")), place)["GPUs"]
    assert "GPU-gone" in check.sentence
    assert UUID not in check.sentence


def test_a_foreign_process_on_a_gpu_is_told_and_one_of_our_own_jobs_is_not_foreign(
    place, monkeypatch
):
    with_gpus(monkeypatch)
    me = psutil.Process()
    check = checked(Needs(kind="train"), place)["foreign processes"]
    assert not check.ok
    assert f"process {me.pid} ({me.name()}, {me.username()}) on GPU 0" in check.sentence
    monkeypatch.setattr(procfs, "is_marked", lambda _: True)
    assert checked(Needs(kind="train"), place)["foreign processes"].ok


def test_a_driver_says_its_cuda_and_runs_what_its_major_version_built():
    for driver, torch, is_ok in [
        ((12, 4), (12, 4), True),
        ((12, 4), (12, 8), True),  # minor version compatibility
        ((13, 0), (12, 8), True),
        ((11, 8), (12, 1), False),
        (None, (12, 1), False),
        ((12, 4), None, False),
    ]:
        assert driver_check(driver, torch).ok is is_ok, (driver, torch, is_ok)
    library = types.SimpleNamespace(nvmlSystemGetCudaDriverVersion_v2=lambda: 12080)
    assert cuda_of_driver(library) == (12, 8)


def test_torchs_cuda_is_read_from_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text("debug = False\ncuda: Optional[str] = '12.8'\n")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert cuda_of_torch() == (12, 8)


def test_the_installed_torch_says_what_its_version_says():
    is_cpu = "+cpu" in importlib.metadata.version("torch")
    assert (cuda_of_torch() is None) is is_cpu


LOOK = """
import sys
from pathlib import Path
from runners.host import preflight
from runners.shared.config import HostConfig, HostDir
from runners.shared.messages import Needs
host_dir = HostDir(Path(sys.argv[1]))
preflight.run_checks(Needs(kind="train"), preflight.HostState(host_dir, HostConfig(), (host_dir.models,)))
print("torch" in sys.modules)
"""


def test_looking_loads_no_torch(host_dir):
    command = [sys.executable, "-c", LOOK, str(host_dir.path)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"False\n"


def test_an_environment_that_is_not_built_is_a_yes_and_an_unknown_one_is_refused(place):
    check = checked(Needs(kind="serve", environment="llamacpp"), place)["environment"]
    assert check.ok, check.sentence
    assert "15 packages, is not built here; the job builds it first" in check.sentence
    check = checked(Needs(kind="serve", environment="elsewhere"), place)["environment"]
    assert not check.ok
    assert "has the environments main, llamacpp" in check.sentence
    assert "'elsewhere'" in check.sentence


GPU_ENVIRONMENT = """# For GPUs; 1 GB.
# probe: one
# size-bytes: 5
# cuda: 13.0
# compute-capability: 7.5
one==1.0
"""


@pytest.fixture
def on_gpus(host_dir, place) -> HostState:
    """A host that has an environment of its own for GPUs."""
    pins = host_dir.path / "environments" / "pins"
    pins.mkdir(parents=True)
    (pins / "ours.txt").write_text(GPU_ENVIRONMENT)
    return place


def test_an_environment_for_gpus_is_refused_by_name_where_there_is_none(on_gpus):
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    check = checked(Needs(kind="serve", environment="ours"), on_gpus)["GPU"]
    assert not check.ok
    assert "NVIDIA GPUs of compute capability 7.5 or newer, with a driver for CUDA 13.0" in (
        check.sentence
    )
    assert "runs on processors: Slipway's own, on transformers; llama.cpp" in check.remedy


def test_old_gpus_and_old_drivers_are_named(on_gpus, monkeypatch):
    for capability, driver, failed in [
        ((9, 0), 13000, set()),
        ((7, 0), 13000, {"GPU"}),
        ((9, 0), 12080, {"driver"}),
    ]:
        library = with_gpus(monkeypatch, 2, driver)
        library.nvmlDeviceGetCudaComputeCapability = lambda _, found=capability: found
        found = checked(Needs(kind="serve", environment="ours"), on_gpus)
        assert {name for name in ("GPU", "driver") if not found[name].ok} == failed, capability


def test_engines_that_divide_the_work_need_gpus_of_their_own_and_a_way_between(
    on_gpus, monkeypatch
):
    for asked, failed in [
        ({"num_gpus": 2}, set()),
        ({"num_gpus": 3}, {"engines"}),
        ({"num_gpus": 2, "packages": ("nixl",)}, {"transfer"}),
        ({"num_gpus": 0, "packages": ("one",)}, set()),
    ]:
        with_gpus(monkeypatch, 2)
        found = checked(Needs(kind="serve", environment="ours", **asked), on_gpus)
        assert {
            name for name in ("engines", "transfer") if name in found and not found[name].ok
        } == (failed)
        if "engines" in failed:
            assert "take 3 GPUs of their own, and this host has 2" in found["engines"].sentence
        if "transfer" in failed:
            assert "pins no nixl" in found["transfer"].sentence, (asked, failed)


def test_products_in_8_bit_floats_ask_for_gpus_that_have_them(place, monkeypatch):
    for capability, is_ok in [((8, 9), True), ((9, 0), True), ((8, 0), False)]:
        library = with_gpus(monkeypatch)
        library.nvmlDeviceGetCudaComputeCapability = lambda _, found=capability: found
        found = checked(Needs(kind="train", compute_dtype="fp8"), place)
        assert found["fp8"].ok == is_ok, (capability, is_ok)
        assert "of compute capability 8.9 or newer" in found["fp8"].sentence, (capability, is_ok)
        assert is_ok or found["fp8"].remedy.endswith("or train with products in BF16."), capability
        assert "fp8" not in checked(Needs(kind="train", compute_dtype="bf16"), place), capability


def test_attention_by_blocks_asks_for_a_gpu_and_for_a_compiler(place, monkeypatch):
    for capability, said in [
        ((9, 0), "1 GPUs of compute capability 7.0 or newer train with FlexAttention."),
        ((6, 1), "too old are NVIDIA"),
        (None, "processors have no backward pass of it"),
    ]:
        if capability:
            library = with_gpus(monkeypatch)
            library.nvmlDeviceGetCudaComputeCapability = lambda _, found=capability: found
        else:
            monkeypatch.setattr(inventory, "_initialised_nvml", lambda: None)
        found = checked(Needs(kind="train", attention="flex", compiles=True), place)
        assert said in found["flex"].sentence, (capability, said)
        assert found["flex"].ok == (capability == (9, 0)), (capability, said)
        assert found["flex"].ok or found["flex"].remedy.endswith(
            "the attention kernel Fused (SDPA)."
        )
        assert "compiler" in found, (capability, said)
        assert "flex" not in checked(Needs(kind="train", attention="flash"), place), capability


def test_a_processor_is_told_to_emulate_products_in_8_bit_floats(place, monkeypatch):
    monkeypatch.setattr(inventory, "_initialised_nvml", lambda: None)
    found = checked(Needs(kind="train", compute_dtype="fp8"), place)
    assert found["fp8"].ok
    assert "emulated, which is slower" in found["fp8"].sentence
    assert f"torchao {importlib.metadata.version('torchao')}" in found["packages"].sentence


def test_an_environment_for_gpus_needs_a_c_compiler(on_gpus, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    check = checked(Needs(kind="serve", environment="ours"), on_gpus)["compiler"]
    assert "none of cc, gcc, clang" in check.sentence
    assert not check.ok
