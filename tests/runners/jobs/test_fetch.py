"""A job that names repositories: they come first, then its program finds folders and no token."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runners.datasets.records import Reader
from runners.environments import builder
from runners.hub.errors import HubError
from runners.hub.settings import HubSettings
from runners.hub.store import scan
from runners.jobs.data_files import open_source
from runners.jobs.events import EVENT_FD_VARIABLE, Emitter, read_events
from runners.jobs.fetch import Fetching, drop_credentials
from runners.jobs.in_environment import drop_pip_variables
from runners.jobspec import (
    CompressSpec,
    DemoModel,
    DownloadedData,
    EvaluateSpec,
    FolderModel,
    GenerateSpec,
    HubData,
    HubModel,
    JobSpec,
    ServeSpec,
    TrainSpec,
)
from runners.launchers import attempts, launch
from runners.shared.environment import NETWORK, TRACKER_VARIABLE
from runners.shared.messages import RunRequest
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.hub.hub_server import Hub
from tests.hub.models import make_data_sets, write_files

CONFIG = '{"model_type": "llama"}'
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"  # the job's own program
TOKEN = "hf_of_the_team"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repositories"
    weights = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": 2**20}
    write_files(folder / "acme/tiny", weights)
    write_files(folder / "acme/tiny-GGUF", {"tiny-Q8_0.gguf": 1000, "tiny-Q4_K_M.gguf": 999})
    coded = json.dumps({"model_type": "coded", "auto_map": {"AutoConfig": "coded.Config"}})
    write_files(
        folder / "acme/coded", {**weights, "config.json": coded, "coded.py": "", "x.bin": 9}
    )
    write_files(folder / "acme/pickled", {"config.json": CONFIG, "pytorch_model.bin": 1000})
    with Hub(folder, tokens={TOKEN}) as made:
        yield made


class Attempt:
    """An attempt's folder, and the process that downloads its models."""

    def __init__(
        self, folder: Path, hub: Hub, named: HubModel | JobSpec, trusted: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.hub = folder / "attempts" / "one", hub
        self.folder.mkdir(parents=True, exist_ok=True)
        fields = {"attempt_id": "one", "job_id": "job", "number": 1, "fence": "f"}
        spec = GenerateSpec(model=named) if isinstance(named, HubModel) else named
        request = RunRequest(spec=spec, trusted_code=trusted, **fields)
        self.spec = self.folder / "spec.json"
        self.spec.write_text(request.model_dump_json())
        self.secrets = {"HF_TOKEN": TOKEN}
        self.cache, self.events = folder / "cache", folder / "events"

    def start(self, **variables: str) -> subprocess.Popen[str]:
        command, env = launch.after_download(
            self.request.spec, self.folder, [sys.executable, "-c", SHOW]
        )
        env = launch.render_env(self.folder.parent.parent, 1) | env
        env |= {"HF_ENDPOINT": self.hub.url, "HF_HUB_CACHE": str(self.cache)}
        env |= attempts.write(self.folder, self.secrets)
        handle = os.open(self.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(handle,),
            env=env | {EVENT_FD_VARIABLE: str(handle)} | variables,
        )  # fmt: skip
        os.close(handle)
        return process

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(**variables) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    @property
    def request(self) -> RunRequest:
        return RunRequest.model_validate_json(self.spec.read_text())


def test_a_repository_becomes_a_folder_before_the_program_starts(tmp_path, hub):
    hub.private = {"acme/tiny"}
    attempt = Attempt(tmp_path, hub, HubModel(repository="acme/tiny"))
    ended = attempt.run(HTTPS_PROXY="http://user:secret@127.0.0.1:9", NO_PROXY="*")
    assert ended.returncode == 0, ended.stderr

    folder = Path(attempt.request.spec.model.path)
    assert folder.name == hub.commit("acme/tiny")
    assert (folder / "model.safetensors").stat().st_size == 2**20
    events = [(each["kind"], each["body"]) for each in read_events(attempt.events)]
    assert ("phase", {"name": "Starting the job's program", "begins_anew": True}) in events
    [*_, last] = [body for kind, body in events if kind == "progress"]
    assert (last["done"], last["unit"]) == (last["total"], "bytes")

    variables = json.loads(ended.stdout.splitlines()[-1])
    kept = {
        name: value for name, value in variables.items() if TOKEN in value or "secret@" in value
    }
    assert kept == {}
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert str(attempt.cache) in variables["SLIPWAY_MODEL_ROOTS"].split(os.pathsep)
    assert not (attempt.folder / "secrets" / "HF_TOKEN").exists()


def test_the_network_reaches_each_program_that_needs_it_and_never_the_jobs_own(monkeypatch):
    everything = {**dict.fromkeys(NETWORK, "n"), "PIP_INDEX_URL": "p", "HF_TOKEN": "t"}
    model = HubModel(repository="acme/tiny")
    tracker = {"name": "mlflow", "url": "http://127.0.0.1:5000"}
    for spec, downloads, builds, left in [
        (GenerateSpec(model=DemoModel()), False, False, set()),
        (GenerateSpec(model=model), True, False, set()),
        (ServeSpec(model=model, engine="vllm"), True, True, set()),
        (ServeSpec(model=DemoModel(), engine="vllm"), False, True, set()),
        (TrainSpec(tracker=tracker), False, True, {*NETWORK}),
        (TrainSpec(model=model, tracker=tracker), True, True, {*NETWORK}),
    ]:
        monkeypatch.setattr(os, "environ", dict(everything))
        names = launch.inherited_variables(spec)
        env = {name: everything[name] for name in names if name in everything}
        monkeypatch.setattr(os, "environ", env | launch.tracker_env(spec))
        folder = Path("/attempt")
        argv, _ = launch.after_download(spec, folder, launch.render_argv(spec, folder))
        assert (launch.FETCH in argv) == downloads
        if downloads:
            assert os.environ.keys() >= {*NETWORK, "HF_TOKEN"}
            drop_credentials(argv[argv.index(str(folder)) + 1 :])
        if builds:
            assert builder.pip_variables().keys() == {*NETWORK, "PIP_INDEX_URL"}
            drop_pip_variables()
        assert os.environ.keys() - {TRACKER_VARIABLE, *launch.OFFLINE} == left, spec


def test_a_second_job_and_one_without_the_hub_use_what_is_there(tmp_path, hub):
    model = HubModel(repository="acme/tiny")
    assert Attempt(tmp_path, hub, model).run().returncode == 0
    sent = hub.sent("/lfs/")
    assert sent >= 2**20
    for variables in ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        again = Attempt(tmp_path, hub, model)
        ended = again.run(**variables)
        assert ended.returncode == 0, ended.stderr
        assert Path(again.request.spec.model.path, "config.json").read_text() == CONFIG
    assert hub.sent("/lfs/") == sent


def test_a_model_of_modelscope_comes_from_there_with_its_token(tmp_path, hub):
    hub.private, hub.tokens, hub.admitted = {"acme/tiny"}, {"ms-token"}, {"ms-token"}
    own = {"MODELSCOPE_ENDPOINT": hub.url, "HF_ENDPOINT": "http://127.0.0.1:9"}
    model = HubModel(repository="acme/tiny", hub="modelscope")
    refused = Attempt(tmp_path, hub, model).run(**own)
    assert "MODEL_OR_DATA_MISSING" in refused.stderr
    for named, more in (
        (model, {"MODELSCOPE_API_TOKEN": "ms-token"}),  # of the host's user
        (HubModel(repository="acme/tiny"), {"VLLM_USE_MODELSCOPE": "1"}),
    ):
        attempt = Attempt(tmp_path, hub, named)
        if "MODELSCOPE_API_TOKEN" not in more:
            attempt.secrets = {"MODELSCOPE_API_TOKEN": "ms-token"}
        ended = attempt.run(**own, **more)
        assert ended.returncode == 0, ended.stderr
        assert Path(attempt.request.spec.model.path).name == hub.commit("acme/tiny")
        assert "ms-token" not in ended.stdout
        assert not (attempt.folder / "secrets/MODELSCOPE_API_TOKEN").exists()


@pytest.mark.slow
def test_code_comes_and_runs_only_where_it_is_allowed_at_that_commit(tmp_path, hub):
    commit, model = hub.commit("acme/coded"), HubModel(repository="acme/coded")
    for trusted in ((), (f"acme/coded@{'a' * 40}", f"acme/tiny@{commit}")):
        ended = Attempt(tmp_path, hub, model, trusted).run()
        assert f"slipway models code allow acme/coded@{commit}" in ended.stderr, trusted
    assert not list((tmp_path / "cache").rglob("*.py"))

    places: set[Path] = set()
    for variables in ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):  # and then out of the cache
        attempt = Attempt(tmp_path, hub, model, (f"acme/coded@{commit}",))
        ended = attempt.run(**variables)
        assert ended.returncode == 0, ended.stderr
        folder = attempt.request.spec.model.path
        seen = json.loads(ended.stdout.splitlines()[-1])
        assert seen["SLIPWAY_CODE_FOLDERS"] == folder
        modules = Path(seen["HF_MODULES_CACHE"])
        assert (modules.parent, modules.is_dir()) == (attempt.folder, True)
        assert modules not in places  # each start has its own
        places.add(modules)
        assert {each.name for each in Path(folder).iterdir()} >= {"coded.py", "config.json"}
        assert not (Path(folder) / "x.bin").exists()


def test_without_the_hub_the_same_rules_hold_for_code(tmp_path, hub):
    """The cache may have modules that another job, or another tool, was given."""
    cache, commit = tmp_path / "cache", hub.commit("acme/coded")
    key, model = f"acme/coded@{commit}", HubModel(repository="acme/coded")
    (tmp_path / "attempts/one").mkdir(parents=True)

    def place(*trusted: str, is_offline: bool = True) -> list[Path]:
        settings = HubSettings(hub.url, cache, margin_bytes=0, is_offline=is_offline)
        with closing(Emitter.from_environment()) as emitter:
            made = Fetching(tmp_path / "attempts/one", settings, emitter, trusted)
            made.place_of(model)
        return made.code_folders

    [folder] = place(key, is_offline=False)
    assert place(key) == [folder]
    with pytest.raises(HubError, match=f"slipway models code allow {key}"):
        place(f"acme/coded@{'a' * 40}")
    for config, words in (
        ('{"auto_map": {"AutoConfig": "evil/x--coded.Config"}}', "another repository"),
        ('{"model_type": "llama", "auto_map": {"AutoConfig": "coded.Config"}}', ""),
    ):
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(config)
        if words:
            with pytest.raises(HubError, match=words):
                place(key)
        else:  # an architecture of transformers itself, whose modules here are not run
            assert place(key) == []


def test_of_gguf_files_the_job_sees_the_chosen_one_alone(tmp_path, hub):
    for chosen, size in (("Q4_K_M", 999), ("tiny-Q8_0.gguf", 1000)):
        model = HubModel(repository="acme/tiny-GGUF", weights="gguf", file=chosen)
        attempt = Attempt(tmp_path / chosen, hub, model)
        attempt.cache = tmp_path / "cache"  # with both of them in the end
        assert attempt.run().returncode == 0
        [link] = Path(attempt.request.spec.model.path).iterdir()
        assert link.stat().st_size == size


@pytest.mark.parametrize(
    ("model", "reason", "words"),
    [
        ({"repository": "acme/none"}, Reason.MODEL_OR_DATA_MISSING, "has no repository"),
        ({"repository": "acme/pickled"}, Reason.MODEL_OR_DATA_MISSING, "pickle"),
        (
            {"repository": "acme/tiny-GGUF", "weights": "gguf"},
            Reason.MODEL_OR_DATA_MISSING,
            "Q4_K_M",
        ),
        ({"repository": "acme/tiny", "revision": "gone"}, Reason.MODEL_OR_DATA_MISSING, "gone"),
        ({"repository": "acme/unreached"}, Reason.DOWNLOAD_FAILED, "is not reached"),
    ],
)
def test_what_cannot_be_had_ends_the_job_with_its_reason(tmp_path, hub, model, reason, words):
    attempt = Attempt(tmp_path, hub, HubModel(**model))
    is_near = model["repository"] != "acme/unreached"
    ended = attempt.run(**({} if is_near else {"HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert words in ended.stderr
    assert classify(Ending(ended.returncode, None, ended.stderr)) is reason
    assert isinstance(attempt.request.spec.model, HubModel)  # no folder of half a model


def test_a_stopped_download_keeps_what_arrived_for_the_next_job(tmp_path, hub):
    hub.hold_at = 2**19
    model = HubModel(repository="acme/tiny")
    with Attempt(tmp_path, hub, model).start() as process:
        assert hub.held.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
    hub.hold_at = -1
    hub.go_on.set()
    assert Attempt(tmp_path, hub, model).run().returncode == 0
    assert hub.sent("/lfs/") < 2**20 + 2**18


DATA = "datasets/tiny/chats"
PARTS = [f"train-0000{at}-of-00002.parquet" for at in (0, 1)]
FEW = HubData(repository=DATA, columns=("messages",), records=5)


def test_a_data_set_becomes_the_files_of_its_split_also_without_the_hub(
    tmp_path, hub, monkeypatch
):
    make_data_sets(hub.folder)
    hub.gated, hub.admitted = {DATA: "manual"}, {TOKEN}
    spec = TrainSpec(data=HubData(repository=DATA))
    hub.truncated["train-00001-of-00002.parquet"] = 1
    for at in ("first", "again"):
        attempt = Attempt(tmp_path, hub, spec)
        ended = attempt.run(**({"HF_HUB_OFFLINE": "1"} if at == "again" else {}))
        assert ended.returncode == 0, ended.stderr
        data = attempt.request.spec.data
        assert isinstance(data, DownloadedData)
        assert data.name == "tiny/chats/train.parquet"
        assert [Path(path).name for path in data.paths] == [
            f"train-0000{at}-of-00002.parquet" for at in (0, 1)
        ]
    assert not list(attempt.cache.rglob("test-*"))
    other = Attempt(tmp_path, hub, TrainSpec(data=HubData(repository=DATA, split="test")))
    assert "HF_HUB_OFFLINE" in other.run(HF_HUB_OFFLINE="1").stderr  # no part of a split
    [stored] = scan(HubSettings(cache=attempt.cache))
    assert (stored.repository, stored.commit, stored.is_complete) == (DATA, hub.commit(DATA), True)

    monkeypatch.setenv("SLIPWAY_MODEL_ROOTS", str(attempt.cache))
    job = type("Job", (), {"host_dir": tmp_path, "attempt_dir": tmp_path})
    with open_source(job, data) as opened:
        reader, digest = Reader(opened.name), opened.digest()
        samples = [each.sample.turns[0].content for each in opened.records(reader)]
        assert (len(samples), len(set(samples)), len(digest)) == (40, 40, 64)
        assert reader.name == "train-00001-of-00002.parquet"  # of an error there


def test_only_the_files_that_hold_the_records_are_downloaded(tmp_path, hub):
    make_data_sets(hub.folder)
    model = FolderModel(path="m")
    for spec, field, names in (
        (EvaluateSpec(model=model, text=FEW), "text", PARTS[:1]),
        (GenerateSpec(model=model, prompts=FEW), "prompts", PARTS[:1]),
        (
            CompressSpec(
                model=model, method="gptq", calibration_data=FEW.model_copy(update={"records": 25})
            ),
            "calibration_data",
            PARTS,
        ),
    ):
        attempt = Attempt(tmp_path, hub, spec)
        ended = attempt.run()
        assert ended.returncode == 0, ended.stderr
        data = getattr(attempt.request.spec, field)
        asked = getattr(spec, field)
        assert [Path(path).name for path in data.paths] == names
        assert (data.columns, data.records) == (asked.columns, asked.records)
        assert {each.name for each in attempt.cache.rglob("train-*")} == {*names}
    offline = Attempt(tmp_path, hub, EvaluateSpec(model=model, text=FEW))
    assert offline.run(HF_HUB_OFFLINE="1").returncode == 0
    whole = Attempt(tmp_path, hub, EvaluateSpec(model=model, text=HubData(repository=DATA)))
    assert "HF_HUB_OFFLINE" in whole.run(HF_HUB_OFFLINE="1").stderr  # 25 records are no split


@pytest.mark.parametrize(
    ("data", "fault", "reason", "words"),
    [
        ({"repository": "datasets/tiny/none"}, {}, "absent", "has no repository"),
        ({"split": "dev"}, {}, "no_split", "no split 'dev': it has test, train"),
        ({}, {"gated": {DATA: "manual"}}, "gated", f"/{DATA} says who may read it"),
        ({"repository": "datasets/tiny/scripted"}, {}, "script", "never runs here"),
        ({}, {"corrupted": {"train-00000-of-00002.parquet": 9}}, "digest", "wrong_digest|digest"),
    ],
)
def test_a_data_set_that_cannot_be_had_ends_the_job_with_its_reason(
    tmp_path, hub, data, fault, reason, words
):
    make_data_sets(hub.folder)
    for name, value in fault.items():
        getattr(hub, name).update(value)
    attempt = Attempt(tmp_path, hub, TrainSpec(data=HubData(**{"repository": DATA} | data)))
    ended = attempt.run()
    marker = "DOWNLOAD_FAILED" if reason == "digest" else "MODEL_OR_DATA_MISSING"
    assert ended.returncode == 3
    assert re.search(f"^{marker}: .*({words})", ended.stderr, re.MULTILINE), ended.stderr
