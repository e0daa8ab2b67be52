"""A job that names addresses of an object store: real requests, signed by Amazon's own library."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planner.specs.base import BadRequestError
from runners.hub import s3_program
from runners.hub.listing import HubFile, new_digest
from runners.hub.names import parse
from runners.hub.objects import StoreAddress, _refusal
from runners.hub.pruning import RULE_FILE, PruneRule
from runners.hub.repository import store_repository
from runners.hub.settings import HubSettings
from runners.hub.store import resolve_offline
from runners.jobs.events import EVENT_FD_VARIABLE, read_events
from runners.jobspec import (
    DownloadedData,
    FileData,
    FolderModel,
    GenerateSpec,
    HubModel,
    JobSpec,
    NamedAdapter,
    ServeSpec,
    TrainSpec,
)
from runners.launchers import attempts, launch
from runners.launchers.launch import LaunchRefusedError, confine
from runners.launchers.model_uses import uses_on_host
from runners.shared.config import HostConfig
from runners.shared.messages import RunRequest
from runners.shared.object_stores import ObjectStore, store_of
from runners.supervision import child
from tests.hub.models import write_files
from tests.hub.s3_server import Store

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "the secret/+of the team"}
MODEL, WEIGHTS = "s3://lab/models/tiny", "lab/models/tiny/model.safetensors"
SIZE = 3 * 2**20
# The test's interpreter has the library that the environment ``s3`` has on hosts.
FETCH = (
    "import sys, pathlib, runners.jobs.fetch as fetch\n"
    "fetch.prepare_environment = lambda *_: pathlib.Path(sys.executable)\n"
    "fetch.main()"
)
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"  # the job's own program


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    buckets = tmp_path / "buckets"
    files = {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}"}
    write_files(
        buckets / "lab/models/tiny",
        {**files, "model.safetensors": SIZE, "pytorch_model.bin": 9, "notes/a + ü.txt": "x"},
    )
    write_files(buckets / "lab/models/two", {"a-Q8_0.gguf": 99, "a-Q4_K_M.gguf": 98})
    write_files(buckets / "lab/data", {"chat.jsonl": "{}\n", "more.jsonl": "{}\n"})
    write_files(buckets / "open/tiny", {**files, "model.safetensors": 1000})
    secret = {KEYS["AWS_ACCESS_KEY_ID"]: KEYS["AWS_SECRET_ACCESS_KEY"]}
    with Store(buckets, keys=secret, public={"open"}) as made:
        yield made


class Attempt:
    """An attempt's folder on a host, and the process that downloads what it names."""

    def __init__(
        self, host: Path, store: Store, spec: JobSpec, job: str = "job", name: str = "one"
    ) -> None:
        self.folder, self.events = host / "attempts" / name, host / "events"
        self.folder.mkdir(parents=True, exist_ok=True)
        stores = [
            {"prefix": f"s3://{name}", "endpoint": store.url, "is_public": name == "open"}
            for name in ("lab", "open", "none-such")
        ]
        (host / "config.json").write_text(json.dumps({"object_stores": stores}))
        fields = {"attempt_id": name, "job_id": job, "number": 1, "fence": "f"}
        self.spec = self.folder / "spec.json"
        self.spec.write_text(RunRequest(spec=spec, **fields).model_dump_json())
        self.secrets, self.cache = dict(KEYS), host / "cache"
        self.program, self.variables = FETCH, {}

    def start(self) -> subprocess.Popen[str]:
        job = [sys.executable, "-c", SHOW]
        command, env = launch.after_download(self.request.spec, self.folder, job)
        assert command[1:3] == ["-m", launch.FETCH]
        env |= launch.render_env(self.folder.parent.parent, 1)
        env |= attempts.write(self.folder, self.secrets) | {"HF_HUB_CACHE": str(self.cache)}
        env |= {"NO_PROXY": "*", "HF_HUB_OFFLINE": "1"} | self.variables
        handle = os.open(self.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        process = subprocess.Popen(
            [sys.executable, "-c", self.program, *command[3:]], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, pass_fds=(handle,),
            env=env | {EVENT_FD_VARIABLE: str(handle)},
        )  # fmt: skip
        os.close(handle)
        return process

    def run(self, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        with self.start() as process:
            out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    @property
    def request(self) -> RunRequest:
        return RunRequest.model_validate_json(self.spec.read_text())


def generating(path: str) -> GenerateSpec:
    return GenerateSpec(model=FolderModel(path=path))


def test_an_address_becomes_a_folder_and_no_key_reaches_the_program(tmp_path, store):
    host = tmp_path / "host"
    attempt = Attempt(host, store, generating(MODEL))
    repository = store_repository(MODEL)
    assert uses_on_host(host / "attempts")(repository)  # before and after it is downloaded
    ended = attempt.run()
    assert ended.returncode == 0, ended.stderr
    folder = Path(attempt.request.spec.model.path)
    assert uses_on_host(host / "attempts")(repository)
    found = sorted(path.name for path in folder.rglob("*"))
    assert found == ["config.json", "model.safetensors", "tokenizer.json"]
    written = (folder / "model.safetensors").read_bytes()
    assert written == (store.folder / WEIGHTS).read_bytes()
    [*_, last] = [
        each["body"] for each in read_events(attempt.events) if each["kind"] == "progress"
    ]
    assert (last["done"], last["unit"]) == (last["total"], "bytes")
    shown = ended.stdout + json.dumps(list(map(str, read_events(attempt.events))))
    assert not any(value in shown for value in KEYS.values())
    assert "X-Amz-Signature" not in shown
    assert not any((attempt.folder / "secrets" / name).exists() for name in KEYS)

    before = len(store.log)
    again = Attempt(host, store, generating(MODEL))
    assert again.run().returncode == 0
    assert again.request.spec.model.path == str(folder)
    assert {each.method for each in store.log[before:] if not each.key.endswith("/")} == {"HEAD"}


def test_the_cache_stands_for_a_store_that_says_nothing_of_the_address_alone(tmp_path, store):
    host = tmp_path / "host"
    before = Attempt(host, store, generating(MODEL))
    assert before.run().returncode == 0
    stored = before.request.spec.model.path
    for failing, busy, words in (
        ([(503, "SlowDown")] * 99, set(), ""),
        ([], {WEIGHTS}, "status 503"),  # it lists another model, whose bytes do not come
    ):
        if busy:
            write_files(store.folder / "lab/models/tiny", {"model.safetensors": SIZE}, seed=5)
        store.failing, store.busy = failing, busy
        attempt = Attempt(host, store, generating(MODEL), job=f"of {words}")
        attempt.program = "import runners.hub.download as d; d.MAX_FAILURES = 1; " + FETCH
        ended = attempt.run()
        assert (ended.returncode, words in ended.stderr) == (3 * bool(words), True), ended.stderr
        assert attempt.request.spec.model.path == (MODEL if words else stored)
    said = [str(each["body"]) for each in read_events(attempt.events)]
    assert sum(f"Out of reach: cached {MODEL}" in each for each in said) == 1


def test_each_answer_of_a_store_has_its_kind_and_its_way_out(tmp_path, store, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    at = {"url": MODEL, "endpoint": store.url, "region": "us-east-1", "is_public": False}
    address = StoreAddress(MODEL, ObjectStore(prefix="s3://lab"))
    for fault, kind, words in (
        ((400, "InvalidToken"), "unauthorised", "store a key that may list and read it"),
        ((400, "ExpiredToken"), "unauthorised", "renew it in the team's secrets"),
        ((403, "AccessDenied"), "unauthorised", "store a key that may list and read it"),
        ((400, "AuthorizationHeaderMalformed"), "refused", 'its "region"'),
        ((409, "OperationAborted"), "refused", "answers OperationAborted"),
    ):
        store.failing = [fault] * 99
        found = s3_program.answer(at | {"suffixes": (".json",)})
        error = _refusal(
            found["status"], found["code"], found["words"], address, HubSettings(cache=tmp_path)
        )
        assert (error.kind, error.is_out_of_reach) == (kind, False), fault
        assert words in str(error), fault
    store.failing = []
    assert _refusal(301, "", "", address, HubSettings(cache=tmp_path)).kind == "refused"
    monkeypatch.setattr(s3_program, "MAX_OBJECTS", 2)
    found = s3_program.answer(at | {"suffixes": (".json",)})
    error = _refusal(0, found["code"], found["words"], address, HubSettings(cache=tmp_path))
    assert error.kind == "unusable"
    assert "name a prefix below that has one model" in str(error)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")  # half a key
    found = s3_program.answer(at | {"suffixes": (".json",)})
    assert found["code"] == s3_program.NOT_ASKED


def test_a_rule_spares_all_that_the_job_names_an_adapter_too(tmp_path, store):
    # Whichever is downloaded last would be made room for by the other.
    host, at = tmp_path / "host", "s3://lab/adapters/one"
    files = {"adapter_config.json": "{}", "adapter_model.safetensors": 1000, "notes.txt": "x"}
    write_files(store.folder / "lab/adapters/one", files)
    adapter = NamedAdapter(name="one", adapter=FolderModel(path=at))
    attempt = Attempt(
        host, store, GenerateSpec(model=FolderModel(path=MODEL), adapters=(adapter,))
    )
    child.write_json(host / RULE_FILE, PruneRule(10).document())
    assert attempt.run().returncode == 0
    found = attempt.request.spec
    assert Path(found.model.path, "model.safetensors").stat().st_size == SIZE
    adapted = sorted(path.name for path in Path(found.adapters[0].adapter.path).iterdir())
    assert adapted == ["adapter_config.json", "adapter_model.safetensors"]
    # Digests are asked of what is selected alone, not of notes.txt.
    asked = {each.key for each in store.log if each.method == "HEAD" and each.status == 200}
    assert asked == {f"lab/{name}" for name in (
        "adapters/one/adapter_config.json", "adapters/one/adapter_model.safetensors",
        "models/tiny/config.json", "models/tiny/tokenizer.json", "models/tiny/model.safetensors",
    )}  # fmt: skip


def test_an_object_that_was_replaced_is_another_commit(tmp_path, store):
    paths = []
    for size, job in ((SIZE, "job"), (SIZE + 1, "other"), (SIZE, "other")):
        write_files(store.folder / "lab/models/tiny", {"model.safetensors": size}, seed=size)
        attempt = Attempt(tmp_path / "host", store, generating(MODEL), job, str(len(paths)))
        ended = attempt.run()
        paths.append(Path(attempt.request.spec.model.path))
    assert [(path / "model.safetensors").stat().st_size for path in paths[:2]] == [SIZE, SIZE + 1]
    assert ended.returncode == 3  # a job's second attempt keeps to what the first one had
    assert "is not what attempt 1 of job other read" in ended.stderr


@pytest.mark.parametrize("kept", ["md5", "parts", "sha256", "none", "untold parts"])
def test_a_wrong_byte_is_found_by_each_digest_that_a_store_keeps(tmp_path, store, kept):
    store.parts = {WEIGHTS: 10**6} if "parts" in kept else {}
    store.tells_parts = kept == "parts"
    has_digest = kept not in {"none", "untold parts"}
    store.checksums = {WEIGHTS} if kept == "sha256" else set()
    store.encrypted = {WEIGHTS} if kept == "none" else set()
    store.corrupted[WEIGHTS] = 1  # fetched again, and right
    attempt = Attempt(tmp_path / "host", store, generating(MODEL))
    assert attempt.run().returncode == 0
    read = Path(attempt.request.spec.model.path, "model.safetensors").read_bytes()
    is_right = read == (store.folder / WEIGHTS).read_bytes()
    assert is_right == has_digest
    store.corrupted[WEIGHTS] = 9
    again = Attempt(tmp_path / "other", store, generating(MODEL))
    ended = again.run()
    assert (ended.returncode == 3) == has_digest
    assert ("arrived 2 times with digest" in ended.stderr) == has_digest


def test_the_digest_of_parts_is_that_of_the_documentation():
    data = bytes(range(256)) * 50
    for size in (1, 100, 6_400, 12_799, 12_800, 20_000):
        digest = new_digest(HubFile("a", len(data), "e", url="u", md5="m", part_bytes=size))
        for at in range(0, len(data), 777):
            digest.update(data[at : at + 777])
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        joined = b"".join(hashlib.md5(each, usedforsecurity=False).digest() for each in parts)
        whole = hashlib.md5(joined, usedforsecurity=False).hexdigest()
        assert digest.hexdigest() == f"{whole}-{len(parts)}", size


@pytest.mark.slow
def test_a_download_goes_on_after_a_cut_body_and_kill_9(tmp_path, store):
    store.cut[WEIGHTS] = 2
    host = tmp_path / "host"
    store.hold_at = SIZE // 2
    attempt = Attempt(host, store, generating(MODEL))
    with attempt.start() as process:
        assert store.held.wait(60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    store.hold_at = -1
    store.go_on.set()
    ended = attempt.run()
    assert ended.returncode == 0, ended.stderr
    read = Path(attempt.request.spec.model.path, "model.safetensors").read_bytes()
    assert read == (store.folder / WEIGHTS).read_bytes()
    assert store.sent < 1.3 * SIZE


@pytest.mark.slow
def test_each_fault_ends_the_job_with_its_words_and_leaves_no_half_model(tmp_path, store):
    wrong_key = {**KEYS, "AWS_SECRET_ACCESS_KEY": "of yesterday"}
    for number, (spec, faults, secrets, words) in enumerate((
        (generating(MODEL), {}, wrong_key, "SignatureDoesNotMatch"),
        (generating(MODEL), {}, {**KEYS, "AWS_ACCESS_KEY_ID": "AKIAGONE"}, "the team's secrets"),
        (generating(MODEL), {"unreadable": {WEIGHTS}}, KEYS, "lists s3://lab/models/tiny/model"),
        (generating("s3://none-such/tiny"), {}, KEYS, "has no bucket 'none-such'"),
        (generating("s3://lab/models/none"), {}, KEYS, "has nothing at s3://lab/models/none"),
        (generating("s3://lab/models/two"), {}, KEYS, "holds 2 GGUF models"),
        (TrainSpec(data=FileData(path="s3://lab/data")), {}, KEYS, "chat.jsonl, more.jsonl"),
        (generating(MODEL), {"failing": [(500, "InternalError")] * 99}, KEYS,
         "answers 500 for"),
    )):  # fmt: skip
        for name in ("unreadable", "failing"):
            setattr(store, name, faults.get(name, type(getattr(store, name))()))
        host = tmp_path / f"host-{number}"
        attempt = Attempt(host, store, spec)
        attempt.secrets = secrets
        ended = attempt.run()
        assert ended.returncode == 3, (words, ended.stderr)
        assert words in ended.stderr
        assert not any(value in ended.stderr for value in secrets.values())
        assert not list(host.rglob("snapshots/*/model.safetensors"))


def test_files_of_data_and_of_ggufs_are_read_from_where_they_came(tmp_path, store):
    attempt = Attempt(
        tmp_path / "host", store, TrainSpec(data=FileData(path="s3://lab/data/chat.jsonl"))
    )
    assert attempt.run().returncode == 0
    data = attempt.request.spec.data
    assert isinstance(data, DownloadedData)
    assert (data.name, Path(data.paths[0]).read_text()) == ("chat.jsonl", "{}\n")
    served = ServeSpec(
        model=FolderModel(path="s3://lab/models/two/a-Q8_0.gguf"), engine="llamacpp"
    )
    attempt = Attempt(tmp_path / "host", store, served)
    assert attempt.run().returncode == 0
    [link] = Path(attempt.request.spec.model.path).iterdir()
    assert (link.name, link.stat().st_size) == ("a-Q8_0.gguf", 99)
    attempt = Attempt(tmp_path / "host", store, generating("s3://open/tiny"))
    attempt.secrets = {}
    assert attempt.run().returncode == 0


def test_no_name_of_a_hub_is_that_of_an_address_in_the_cache(tmp_path):
    repository = store_repository(MODEL)
    for read in (lambda: HubModel(repository=repository), lambda: parse(f"{repository}@s3/main")):
        with pytest.raises((ValueError, BadRequestError), match="give its address, s3://"):
            read()
    commit, hub = "a" * 40, HubSettings(cache=tmp_path)
    of_store = replace(hub, hub="s3")
    for at in (f"snapshots/{commit}/config.json", "refs/s3/main"):
        path = hub.repository_folder(repository) / at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    for revision in ("", "main", "s3/main", commit):
        assert resolve_offline(repository, revision, hub) is None, revision
    assert [resolve_offline(repository, each, of_store) for each in ("", commit)] == [commit] * 2


def test_only_a_job_that_names_an_address_inherits_the_host_s_key(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the agent")
    of_hub = GenerateSpec(model=HubModel(repository="acme/tiny"))
    assert {*KEYS} <= {*launch.inherited_variables(generating(MODEL))}
    assert not {*KEYS} & {*launch.inherited_variables(of_hub), *launch.hub_env()}


def test_a_host_reads_of_the_prefixes_that_its_operator_lists_alone(tmp_path):
    stores = HostConfig.model_validate({
        "object_stores": [{"prefix": "s3://lab/models/"}, {"prefix": "s3://lab", "region": "r"}]
    }).object_stores  # fmt: skip
    assert store_of("s3://lab/models/a", stores) is stores[0]
    assert store_of("s3://lab/modelsx", stores) is stores[1]
    spec = generating("s3://lab-of-others/a")
    with pytest.raises(LaunchRefusedError, match=r'operator add its prefix to "object_stores"'):
        confine(spec, (tmp_path,), tmp_path, (), stores)
    inside = generating("s3://lab/models/a")
    assert confine(inside, (tmp_path,), tmp_path, (), stores) == inside
    with pytest.raises(LaunchRefusedError, match="none"):
        confine(TrainSpec(data=FileData(path="s3://lab/a.jsonl")), (tmp_path,), tmp_path)
    for path, words in (  # of a job that an earlier release stored, too: it stays readable
        ("s3://lab/../other/a", "without empty parts"),
        ("s3://LAB/a", "small letters"),
        ("s3://lab", "names no object"),
        ("gs://lab/a", "hosts do not read"),
    ):
        for named in (generating(path), TrainSpec(data=FileData(path=path))):
            with pytest.raises(LaunchRefusedError, match=words):
                confine(named, (tmp_path,), tmp_path, (), stores)
    for prefix in ("lab/models", "s3://", "s3://lab/../x"):
        with pytest.raises(ValueError, match="no prefix such as"):
            ObjectStore(prefix=prefix)
