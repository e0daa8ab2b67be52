"""From spec to process: closed lists, confined paths, an environment from nothing."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from runners.host.reconcile import Reconciler
from runners.host.shipping import ServerClient
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    DrillSpec,
    EvaluateSpec,
    FileData,
    FilePrompts,
    FolderModel,
    GenerateSpec,
    HostText,
    JobSpec,
    MixedData,
    RandomModel,
    ServeSpec,
    TrainSpec,
    WeightedData,
)
from runners.jobspec.base import sources_of
from runners.jobspec.kinds import KINDS
from runners.jobspec.rewards import parse_rewards
from runners.launchers import launch
from runners.launchers.attempts import AttemptFolder
from runners.launchers.launch import LaunchRefusedError, confine, render_argv, render_env
from runners.shared.config import HostConfig
from runners.shared.messages import RunDevice, WantedAttempt
from runners.shared.reasons import Reason
from runners.supervision import procfs
from runners.supervision.child import EVENT_FD
from tests.runners.tools import ids_of


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, ...]:
    for name in ("models", "more", "elsewhere", "attempts"):
        (tmp_path / name / "llama").mkdir(parents=True)
    return tmp_path / "models", tmp_path / "more"


def resolve(path: str, roots: tuple[Path, ...]) -> str:
    spec = BenchmarkSpec(model=FolderModel(path=path))
    return confine(spec, roots, roots[0].parent / "attempts").model.path


def test_each_kind_of_job_has_its_own_module_and_engines_their_own_environment():
    for spec, module in [
        (TrainSpec(), "runners.jobs.train"),
        (CompressSpec(model=DemoModel()), "runners.jobs.compress"),
        (EvaluateSpec(model=DemoModel()), "runners.jobs.evaluate"),
        (BenchmarkSpec(model=DemoModel()), "runners.jobs.load.benchmark"),
        (GenerateSpec(model=DemoModel()), "runners.jobs.generate"),
        (ServeSpec(model=DemoModel()), "runners.jobs.serve"),
        (DrillSpec(), "runners.jobs.drill"),
    ]:
        assert render_argv(spec, Path("/a/1")) == [sys.executable, "-m", module, "/a/1"], spec

    spec = ServeSpec(model=DemoModel(), engine="llamacpp")
    started = [sys.executable, "-m", "runners.jobs.in_environment", "llamacpp"]
    assert render_argv(spec, Path("/a/1")) == [*started, "runners.jobs.serve.llamacpp", "/a/1"]

    for options, environment in ((None, "vllm"), ({}, "vllm"), ({"device": "cpu"}, "vllm_cpu")):
        fields = {"model": DemoModel(), "engine": "vllm", "engine_options": options}
        *_, found, _module, _folder = render_argv(ServeSpec.model_validate(fields), Path("/a/1"))
        assert found == environment == launch.environment_of(fields | {"kind": "serve"}), options


def test_only_a_job_that_may_build_hears_of_the_package_index(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:word@index")
    own, other = (ServeSpec(model=DemoModel(), engine=name) for name in ("slipway", "llamacpp"))
    assert launch.inherited_variables(own) == []
    assert "PIP_INDEX_URL" in launch.inherited_variables(other)


def test_a_kind_that_the_host_does_not_know_is_refused():
    spec = BenchmarkSpec.model_construct(kind="teleport", model=DemoModel())
    with pytest.raises(
        LaunchRefusedError, match="this host runs train, compress, evaluate, benchmark"
    ):
        render_argv(spec, Path("/a/1"))


@given(text=st.text(max_size=60))
def test_no_text_of_a_spec_reaches_the_command(text):
    spec = BenchmarkSpec(model=RandomModel(config={text: text}))
    argv = render_argv(spec, Path("/a/$(reboot); rm -rf ~"))
    assert argv[1:] == ["-m", "runners.jobs.load.benchmark", "/a/$(reboot); rm -rf ~"]


def test_no_shell_stands_anywhere_in_the_host_code():
    sources = [path.read_text() for path in Path(launch.__file__).parent.rglob("*.py")]
    assert not any("shell=True" in text or "os.system(" in text for text in sources)


def test_a_model_below_a_root_is_resolved_and_an_absent_one_missing(roots):
    assert resolve("llama", roots) == str(roots[0] / "llama")
    assert resolve(str(roots[1] / "llama"), roots) == str(roots[1] / "llama")
    with pytest.raises(LaunchRefusedError, match="is not on this host") as refusal:
        resolve("mistral", roots)
    assert refusal.value.reason is Reason.MODEL_OR_DATA_MISSING


def test_a_model_outside_of_every_root_is_refused(roots):
    for path in ["../elsewhere/llama", "/etc", "..", "llama/../../elsewhere/llama", "/"]:
        with pytest.raises(
            LaunchRefusedError, match="outside of this host's model folders"
        ) as refusal:
            resolve(path, roots)
        assert refusal.value.reason is Reason.PREFLIGHT_FAILED, path


def test_a_link_that_leads_out_of_a_root_is_refused(roots):
    (roots[0] / "link").symlink_to(roots[0].parent / "elsewhere")
    with pytest.raises(LaunchRefusedError, match="outside"):
        resolve("link/llama", roots)


def test_prompts_and_the_original_of_an_evaluation_lie_below_a_root_too(roots):
    for path in ["../elsewhere/p.txt", "/etc/passwd", "p\0.txt"]:
        spec = GenerateSpec(model=DemoModel(), prompts=FilePrompts(path=path))
        with pytest.raises(LaunchRefusedError, match=r"is outside of|is not usable"):
            confine(spec, roots, roots[0].parent / "attempts")
    spec = GenerateSpec(model=DemoModel(), prompts=FilePrompts(path="p.txt"))
    found = confine(spec, roots, roots[0].parent / "attempts")
    assert found.prompts == FilePrompts(path=str(roots[0] / "p.txt"))
    spec = EvaluateSpec(model=DemoModel(), original=FolderModel(path="../elsewhere/llama"))
    with pytest.raises(LaunchRefusedError, match="is outside of"):
        confine(spec, roots, roots[0].parent / "attempts")


def test_reward_functions_are_files_of_their_own_folders_and_of_no_models_or_jobs(roots):
    def training(path):
        return TrainSpec(
            engine="trl", objective="grpo", model=FolderModel(path="llama"), sequence_length=512,
            data=FileData(path="a.jsonl"), micro_batch_size=8,
            reward_functions=parse_rewards(f"exact_match\n{path}"),
        )  # fmt: skip

    attempts, rewards = roots[0].parent / "attempts", roots[0].parent / "rewards"
    found = confine(training("style.py:f 0.5"), roots, attempts, (rewards,))
    assert [each.path for each in found.reward_functions] == ["", str(rewards / "style.py")]
    for path in (roots[0] / "x.py", attempts / "a1/output/model/x.py", "/etc/x.py"):
        with pytest.raises(LaunchRefusedError, match=r'reward folders .*"reward_roots" in config'):
            confine(training(path), roots, attempts, (rewards,))


def test_a_path_with_a_null_byte_is_refused(roots):
    with pytest.raises(LaunchRefusedError):
        resolve("llama\0", roots)


@given(path=st.text(max_size=30))
def test_no_path_resolves_out_of_its_root(tmp_path_factory, path):
    root = tmp_path_factory.getbasetemp()
    try:
        found = resolve(path, (root,))
    except (LaunchRefusedError, OSError):
        return
    assert Path(found).is_relative_to(root.resolve())


def test_an_artefact_is_named_and_never_a_path(roots):
    for attempt_id, name in [("..", "x"), ("a1", "../x"), ("a/b", "x"), ("a1", "")]:
        spec = BenchmarkSpec(model=ArtefactModel(attempt_id=attempt_id, name=name))
        with pytest.raises(LaunchRefusedError, match="is not a valid artefact name"):
            confine(spec, roots, roots[0].parent / "attempts")


def test_training_data_lies_below_a_root_as_models_do(roots):
    def training(path, *, is_mixed):
        data = FileData(path=path)
        parts = [WeightedData(data=each, weight=1.0) for each in (HostText(), data)]
        return TrainSpec(data=MixedData(parts=tuple(parts)) if is_mixed else data)

    attempts = roots[0].parent / "attempts"
    for is_mixed in (False, True):
        inside = confine(training("data/a.jsonl", is_mixed=is_mixed), roots, attempts)
        with pytest.raises(LaunchRefusedError, match="outside of this host's model folders"):
            confine(training("../../secret.jsonl", is_mixed=is_mixed), roots, attempts)
        assert sources_of(inside.data)[-1].path == str(roots[0].resolve() / "data" / "a.jsonl")


def test_an_artefact_of_this_host_is_found_and_one_that_is_gone_is_missing(roots):
    attempts = roots[0].parent / "attempts"
    (attempts / "a1" / "output" / "model").mkdir(parents=True)
    spec = BenchmarkSpec(model=ArtefactModel(attempt_id="a1"))
    assert confine(spec, roots, attempts) == spec
    spec = BenchmarkSpec(model=ArtefactModel(attempt_id="a9"))
    with pytest.raises(LaunchRefusedError) as refusal:
        confine(spec, roots, roots[0].parent / "attempts")
    assert refusal.value.reason is Reason.MODEL_OR_DATA_MISSING


def test_a_job_receives_the_operators_settings_and_no_secret_or_hook(monkeypatch, tmp_path):
    passed = (
        "NCCL_IB_HCA", "RCCL_MSCCL_ENABLE", "UCX_TLS", "GLOO_SOCKET_IFNAME", "FI_PROVIDER", "CC",
        "CXX", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HSA_OVERRIDE_GFX_VERSION",
        "MIOPEN_USER_DB_PATH", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH",
        "CUDA_DEVICE_ORDER",
    )  # fmt: skip
    kept_back = (
        "LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP", "HF_TOKEN", "REDIS_URL", "VLLM_API_KEY",
        "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH_TOKEN", "UCX_PASSWORD", "NCCLX", "CCACHE_DIR",
    )  # fmt: skip
    for name in (*passed, *kept_back):
        monkeypatch.setenv(name, "canary")

    env = render_env(tmp_path, 1)

    assert {name for name, value in env.items() if value == "canary"} == set(passed)


def test_a_job_is_told_its_share_of_the_cores_and_the_folders_that_it_may_read(
    tmp_path, monkeypatch
):
    cores = int(procfs.usable_cores())
    threads = [int(render_env(tmp_path, jobs)["OMP_NUM_THREADS"]) for jobs in (1, cores, 99)]
    assert threads == [cores, 1, 1]
    for usable, jobs, expected in ((6.5, 1, "6"), (6.5, 2, "3"), (0.5, 1, "1")):  # by a quota
        monkeypatch.setattr(procfs, "usable_cores", lambda usable=usable: usable)
        assert render_env(tmp_path, jobs)["OMP_NUM_THREADS"] == expected, usable
    env = render_env(tmp_path, 1, (tmp_path / "a", tmp_path / "b"))
    assert env["SLIPWAY_MODEL_ROOTS"] == f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}"


def held(kind: str, uuid: str) -> RunDevice:
    return RunDevice(kind=kind, index=0, uuid=uuid)


def test_a_job_sees_the_gpus_that_it_holds_and_no_others(tmp_path, monkeypatch):
    given = {
        "CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2",
        "GPU_DEVICE_ORDINAL": "3",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    env = render_env(tmp_path, 1, (), [held("gpu", "GPU-b"), held("gpu", "GPU-d")])
    assert {name: env[name] for name in given if name in env} == {
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-d"
    }


def test_a_job_counts_gpus_as_the_inventory_does_unless_the_agent_was_told_otherwise(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert render_env(tmp_path, 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert render_env(tmp_path, 1)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_job_on_amd_gpus_is_given_them_through_rocr_alone(tmp_path, monkeypatch):
    for uuids, selected in [
        (
            ["GPU-8af705259683161c", "GPU-dc91284879207f2b"],
            "GPU-8af705259683161c,GPU-dc91284879207f2b",
        ),
        (["GPU-8af705259683161c", "GPU-8af705259683161c#1"], "0,1"),  # partitions of one GPU
        (["PCI-0000:03:00.0-5f1d"], "0"),  # a Radeon without a number
    ]:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, "3")
        devices = [
            RunDevice(kind="gpu", index=index, uuid=uuid) for index, uuid in enumerate(uuids)
        ]
        env = render_env(tmp_path, 1, (), devices)
        assert {name: value for name, value in env.items() if "VISIBLE" in name} == {
            "ROCR_VISIBLE_DEVICES": selected
        }


def test_a_job_on_a_processor_keeps_what_the_agent_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    env = render_env(tmp_path, 1, (), [held("cpu", "cpu")])
    assert env["CUDA_VISIBLE_DEVICES"] == "0"


# Whatever a spec holds: commands keep their length, environments their names, paths roots.

A1, _ = ids_of(__name__)

SPEC: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)
NASTY = [
    "$(touch owned)", "`id`", "; rm -rf /", "a\nb", "a\0b", "--trust-remote-code", "-m os", "| sh",
    "&& reboot", "${IFS}", "'\"", "../../etc", "/etc/passwd", "%2e%2e/%2e%2e/etc", "~root", "\u202e",
    "a" * 5000,
]  # fmt: skip
TEXT = st.one_of(st.sampled_from(NASTY), st.text(max_size=40))
MODELS = st.one_of(
    st.builds(DemoModel),
    st.builds(FolderModel, path=TEXT),
    st.builds(ArtefactModel, attempt_id=TEXT, name=TEXT),
    st.builds(RandomModel, config=st.dictionaries(TEXT, TEXT, max_size=4)),
)
SPECS = st.one_of(
    st.builds(TrainSpec, model=MODELS, seed=st.integers()),
    st.builds(CompressSpec, model=MODELS, seed=st.integers()),
    st.builds(BenchmarkSpec, model=MODELS, seed=st.integers()),
    st.builds(GenerateSpec, model=MODELS, seed=st.integers()),
    st.builds(ServeSpec, model=MODELS, port=st.just(0), host=st.just("127.0.0.1")),
)


@given(spec=SPECS)
def test_every_spec_is_a_command_of_four_parts_with_nothing_of_it(spec):
    argv = render_argv(spec, Path("/attempts/a1"))
    assert argv == [sys.executable, "-m", KINDS[spec.kind].module, "/attempts/a1"]


@given(spec=SPECS)
def test_no_model_of_any_spec_leaves_the_hosts_folders(tmp_path_factory, spec):
    base = tmp_path_factory.getbasetemp()
    roots = (base / "fuzz-models",)
    (roots[0] / "llama").mkdir(parents=True, exist_ok=True)
    try:
        found = confine(spec, roots, base / "fuzz-attempts").model
    except (LaunchRefusedError, OSError):
        return
    if isinstance(found, FolderModel):
        assert Path(found.path).is_relative_to(roots[0].resolve())
        assert Path(found.path) == Path(found.path).resolve()
    else:
        assert not isinstance(found, ArtefactModel)  # none of these is there


def test_an_encoded_path_is_a_name_and_never_a_way_out(tmp_path):
    (tmp_path / "models/llama").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for path in ("%2e%2e/elsewhere", "..%2felsewhere", "llama%00", "llama/%2e%2e"):
        spec = BenchmarkSpec(model=FolderModel(path=path))
        with pytest.raises(LaunchRefusedError):
            confine(spec, (tmp_path / "models",), tmp_path / "attempts")


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(
    kind=st.sampled_from(["train", "compress", "benchmark", "generate", "serve", "shell"]),
    more=st.dictionaries(TEXT, DOCUMENTS, max_size=3),
    model=DOCUMENTS,
)
@example(kind="train", more={"argv": ["sh", "-c", "id"]}, model={"source": "demo"})
@example(kind="train", more={"env": {"LD_PRELOAD": "x"}}, model={"source": "demo"})
@example(kind="benchmark", more={"trust_remote_code": True}, model={"source": "demo"})
@example(kind="train", more={"secrets": ["LD_PRELOAD\n"]}, model={"source": "demo"})
def test_a_document_is_a_spec_of_known_fields_or_refused(kind, more, model):
    document = {**more, "kind": kind, "model": model}
    try:
        spec = SPEC.validate_python(document)
    except ValidationError:
        return
    assert set(document) <= set(type(spec).model_fields)


@given(name=TEXT)
def test_a_secrets_name_is_a_variables_name_or_refused(name):
    try:
        spec = TrainSpec(secrets=(name,))
    except ValidationError:
        return
    assert spec.secrets[0].isascii()
    assert spec.secrets[0].replace("_", "").isalnum()


# The processes themselves

SHOW = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('seen.json', 'w'))"
TRICKS = {
    "LD_PRELOAD": "/tmp/evil.so", "LD_AUDIT": "x", "PYTHONPATH": "/tmp/evil", "PYTHONHOME": "/tmp",
    "PYTHONSTARTUP": "x", "BASH_ENV": "x", "IFS": "x", "HF_TOKEN": "x", "REDIS_URL": "x",
    "GIT_SSH_COMMAND": "x", "AWS_SECRET_ACCESS_KEY": "x",
}  # fmt: skip


@pytest.fixture
def seen(acceptor, host_dir, attempts, monkeypatch):
    """Arguments and environment of a job that a host in a hostile environment started."""
    for name, value in TRICKS.items():
        monkeypatch.setenv(name, value)
    client = ServerClient(acceptor.url, "host-credential")
    reconciler = Reconciler(
        host_dir,
        HostConfig(),
        client,
        boot_id=procfs.boot_id(),
        render=lambda _spec, folder: [sys.executable, "-c", SHOW, str(folder), "$(id)", "a\nb"],
    )
    monkeypatch.delenv("PYTHONHOME")  # the interpreter that runs this test needs none
    reconciler.claim(WantedAttempt(attempt_id=A1, fence=acceptor.want(A1).fence))
    client.close()
    folder = AttemptFolder(host_dir.attempts / A1)
    attempts.wait(folder)
    return json.loads((folder.path / "seen.json").read_text())


def test_each_argument_arrives_as_one_whatever_it_holds(seen, host_dir):
    assert seen[0] == [str(host_dir.attempts / A1), "$(id)", "a\nb"]


def test_the_jobs_environment_is_the_list_and_nothing_else(seen, host_dir):
    expected = render_env(host_dir.path, 1)
    extra = set(seen[1]) - set(expected)
    assert extra == {procfs.MARKER, EVENT_FD} | (extra & {"LC_CTYPE"})  # Python's own, in C
    assert {name: seen[1][name] for name in expected} == expected
    assert "x" not in seen[1].values()
    assert seen[1]["PYTHONPATH"] == str(Path(launch.__file__).resolve().parents[2])
    assert os.environ["PYTHONPATH"] == "/tmp/evil"
