"""Whatever a spec holds: commands keep their length, environments their names, paths roots."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from runners import launch
from runners.attempts import AttemptFolder
from runners.client import ServerClient
from runners.config import HostConfig
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    FolderModel,
    GenerateSpec,
    JobSpec,
    RandomModel,
    ServeSpec,
    TrainSpec,
)
from runners.launch import LaunchRefusedError, confine, render_argv, render_env
from runners.messages import Wanted
from runners.reconcile import Reconciler
from runners.supervision import procfs
from runners.supervision.child import EVENT_FD
from tests.runners.tools import ids_of

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

    assert argv == [sys.executable, "-m", launch.JOB_MODULES[spec.kind], "/attempts/a1"]


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


@pytest.mark.parametrize(
    "path", ["%2e%2e/elsewhere", "..%2felsewhere", "llama%00", "llama/%2e%2e"]
)
def test_an_encoded_path_is_a_name_and_never_a_way_out(tmp_path, path):
    (tmp_path / "models/llama").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
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
    reconciler.claim(Wanted(attempt_id=A1, fence=acceptor.want(A1).fence))
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


def test_the_modules_of_a_job_come_from_the_product_alone(seen):
    assert seen[1]["PYTHONPATH"] == str(Path(launch.__file__).resolve().parent.parent)
    assert os.environ["PYTHONPATH"] == "/tmp/evil"
