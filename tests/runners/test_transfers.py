"""Calls, artefacts and training data between host and server, and what goes wrong with each."""

import hashlib
import json
import re
from pathlib import Path, PurePosixPath

import httpx
import pytest
from pydantic import ValidationError

from runners.host import inventory, shipping
from runners.host.reconcile import Fetcher
from runners.host.shipping import (
    RefusedError,
    ServerClient,
    ServerError,
    UnknownOptionsError,
    UnreachableError,
    upload_artefacts,
)
from runners.jobspec import BenchmarkSpec, DemoModel, HubModel, TrainSpec, UploadedData
from runners.launchers.attempts import AttemptFolder
from runners.launchers.launch import LaunchRefusedError
from runners.shared.facts import GpuFacts, HostFacts
from runners.shared.messages import (
    Beat,
    BeatReply,
    CachedModel,
    CacheReport,
    ClaimReply,
    ClaimRequest,
    CopyState,
    EnrollReply,
    EnrollRequest,
    EnvironmentOrder,
    EpochShown,
    EventAck,
    EventBatch,
    Gang,
    LinkReport,
    Needs,
    RotateReply,
    RotateRequest,
    RunDevice,
    RunRequest,
    StopOrder,
    UploadState,
    WantedAttempt,
)
from runners.shared.reasons import Reason
from runners.supervision import child
from tests.runners.acceptor import of_newer_server
from tests.runners.tools import ids_of

# Artefacts on their way to the server: in parts, resumed, and never from elsewhere.

A1, A2 = ids_of(__name__)


@pytest.fixture
def folder(attempts) -> AttemptFolder:
    return fresh(attempts, A1)


def fresh(attempts, attempt_id: str) -> AttemptFolder:
    made = attempts.make(attempt_id)
    (made.output / "model" / "sub").mkdir(parents=True)
    return made


def announce(folder: AttemptFolder, contents: dict[str, bytes], **changes: object) -> None:
    for path, data in contents.items():
        (folder.output / "model" / path).write_bytes(data)
    body = {
        "name": "model",
        "kind": "model",
        "total_bytes": sum(map(len, contents.values())),
        "files": {path: len(data) for path, data in contents.items()},
        "sha256": dict.fromkeys(contents, "0" * 64),
    }
    child.write_json(folder.path / "artefacts.json", {"artefacts": [body | changes]})


def arrived(acceptor, path: str) -> bytes:
    return (acceptor.uploads / A1 / "artefacts/model" / path).read_bytes()


def test_all_files_arrive(acceptor, client, folder):
    announce(folder, {"config.json": b"{}", "sub/weights": b"w" * 1000, "empty": b""})
    assert upload_artefacts(folder, client, 10**6) == 1002
    assert arrived(acceptor, "sub/weights") == b"w" * 1000
    assert arrived(acceptor, "empty") == b""
    assert folder.is_uploaded


def test_a_large_file_goes_in_parts(acceptor, client, folder, monkeypatch):
    monkeypatch.setattr(shipping, "PART_BYTES", 100)
    data = bytes(range(250)) * 2
    announce(folder, {"weights": data})
    upload_artefacts(folder, client, 10**6)
    assert arrived(acceptor, "weights") == data


def test_an_upload_goes_on_where_it_stopped(acceptor, client, folder):
    announce(folder, {"weights": b"0123456789"})
    target = acceptor.uploads / A1 / "artefacts/model/weights"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"0123")
    assert upload_artefacts(folder, client, 10**6) == 6
    assert arrived(acceptor, "weights") == b"0123456789"


def test_what_exceeds_the_cap_stays_on_the_host(acceptor, client, folder):
    announce(folder, {"weights": b"x" * 100})
    assert upload_artefacts(folder, client, 99) == 0
    assert folder.is_uploaded
    assert not acceptor.uploads.exists()


def refusing(status: int):
    def refuse(*_):
        raise RefusedError(status, "that job was deleted")

    return refuse


def test_an_absent_server_or_an_answer_that_may_change_leaves_the_upload_for_later(
    client, folder, monkeypatch
):
    announce(folder, {"weights": b"x"})
    with pytest.raises(UnreachableError):
        upload_artefacts(folder, ServerClient("http://127.0.0.1:9"), 10**6)
    assert not folder.is_uploaded
    for status in (401, 403, 408, 429, 500, 503):
        monkeypatch.setattr(client, "received_bytes", refusing(status))
        with pytest.raises(RefusedError, match="that job was deleted"):
            upload_artefacts(folder, client, 10**6)
        assert not folder.is_uploaded, status


def test_a_refusal_for_good_is_not_asked_again(client, attempts, monkeypatch, caplog):
    for status in (404, 409, 422):
        folder = fresh(attempts, f"refused-{status}")
        announce(folder, {"weights": b"x"})
        monkeypatch.setattr(client, "received_bytes", refusing(status))
        caplog.clear()
        assert upload_artefacts(folder, client, 10**6) == 0, status
        assert folder.is_uploaded, status
        assert "that job was deleted" in caplog.text, status


def test_no_path_out_of_the_artefact_and_no_link_is_read(acceptor, client, attempts):
    for number, (name, path) in enumerate([
        ("model", "../../spec.json"), ("model", "/etc/passwd"), ("model", "link"),
        ("model", "sub/../../../spec.json"), ("../..", "spec.json"),
    ]):  # fmt: skip
        folder = fresh(attempts, f"out-{number}")
        (folder.output / "model" / "link").symlink_to("/etc/passwd")
        size = (folder.output / "model" / path).stat().st_size if name == "model" else 1
        announce(folder, {}, name=name, files={path: size}, sha256={path: "0" * 64})
        assert upload_artefacts(folder, client, 10**9) == 0, path
    assert not acceptor.uploads.exists()


def test_a_file_that_changed_after_its_announcement_is_left_out(acceptor, client, folder):
    announce(folder, {"weights": b"12345"})
    (folder.output / "model" / "weights").write_bytes(b"1234567")
    assert upload_artefacts(folder, client, 10**6) == 0


# Training data on its way from the server: whole and as it was meant, or not at all.

CONTENT = b'{"text": "one"}\n' * 1000


def training(content=CONTENT):
    digest = hashlib.sha256(content).hexdigest()
    data = UploadedData(dataset_id="d1", name="a.jsonl", sha256=digest, size_bytes=len(content))
    return TrainSpec(data=data)


@pytest.fixture
def claimed(host_dir) -> AttemptFolder:
    found = AttemptFolder(host_dir.attempts / A1)
    found.make_claim("fence", "boot")
    return found


@pytest.fixture
def fetcher(client):
    return Fetcher(client)


def test_a_job_that_names_no_upload_has_all(fetcher, claimed):
    assert fetcher.has_all(claimed, BenchmarkSpec(model=DemoModel()))
    assert fetcher.has_all(claimed, TrainSpec())


def test_a_file_is_fetched_once_and_goes_with_what_is_forgotten(acceptor, fetcher, claimed):
    acceptor.data["d1"] = CONTENT
    assert fetcher.has_all(claimed, training())
    acceptor.data.clear()
    assert fetcher.has_all(claimed, training())
    assert (claimed.data / "d1.jsonl").read_bytes() == CONTENT
    claimed.forget()
    assert not claimed.data.exists()


def test_another_file_than_was_meant_is_refused_and_not_kept(acceptor, fetcher, claimed):
    for held in [CONTENT + b"x", CONTENT[:-1], CONTENT[:-2] + b"]\n"]:
        acceptor.data["d1"] = held
        with pytest.raises(LaunchRefusedError, match=r"a\.jsonl arrived with .*upload") as refused:
            fetcher.has_all(claimed, training())
        assert refused.value.reason is Reason.MODEL_OR_DATA_MISSING, held
        assert list(claimed.data.iterdir()) == [], held


def test_what_the_server_no_longer_has_ends_the_attempt_and_an_absent_one_is_asked_again(
    fetcher, claimed, acceptor
):
    with pytest.raises(LaunchRefusedError, match="no longer has the training data"):
        fetcher.has_all(claimed, training())
    client = ServerClient("http://127.0.0.1:9", "host-credential")
    away = Fetcher(client)
    assert not away.has_all(claimed, training())
    client.close()


def test_a_slow_file_holds_nothing_up(acceptor, fetcher, claimed, monkeypatch):
    acceptor.data["d1"] = CONTENT
    monkeypatch.setattr("runners.host.reconcile.DOWNLOAD_WAIT_SECONDS", 0.0)
    answers = [fetcher.has_all(claimed, training())]
    while not answers[-1]:
        answers.append(fetcher.has_all(claimed, training()))
    assert answers[-1]


# Calls to the server: what comes back, and one sentence for each thing that goes wrong.

CLAIM = ClaimRequest(fence="f", claim_id="c", boot_id="b")
BATCH = EventBatch(attempt_id="a1", fence="f", events=())


def client_of(answer, credential="secret") -> ServerClient:
    return ServerClient("http://server/", credential, httpx.MockTransport(answer))


def test_the_credential_is_sent_with_each_call():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers["Authorization"]))
        return httpx.Response(200, json={"attempt_id": "a1", "acked_seq": 4})

    assert client_of(answer).send_events(BATCH).acked_seq == 4
    assert seen == [("/api/v1/attempts/a1/events", "Bearer secret")]


def test_a_refusal_carries_its_status_and_the_servers_own_words():
    client = client_of(lambda _: httpx.Response(409, json={"detail": "claimed before"}))
    with pytest.raises(RefusedError, match="with 409: claimed before") as refusal:
        client.claim("a1", CLAIM)
    assert refusal.value.status == 409
    assert not refusal.value.is_unauthorized


def test_a_refusal_says_how_long_to_wait_where_the_server_did():
    for status, words, wait in [
        (429, "7", 7.0),
        (503, "30", 30.0),
        (429, "Wed, 21 Oct 2026 07:28:00 GMT", None),
        (401, "7", None),  # refused for good
    ]:
        answer = httpx.Response(status, headers={"Retry-After": words}, json={"detail": "no"})
        with pytest.raises(RefusedError) as refusal:
            client_of(lambda _, said=answer: said).claim("a1", CLAIM)
        assert refusal.value.retry_after_seconds == wait, (status, words, wait)


# The inventory's fields as sites knew them before vendors, links and problems were added.
OLD_GPU = {
    *("index", "uuid", "name", "memory_bytes", "compute_capability", "power_limit_watts"),
    *("pci_bus_id", "pcie_width", "pcie_max_width", "numa_node", "has_ecc", "needs_reset"),
    *("ecc_corrected_errors", "ecc_uncorrected_errors", "is_worn_out", "is_partitioned", "xids"),
}
NEW_FACTS = {
    *("rocm_version", "torch_rocm_version", "other_gpus", "device_problems", "peer_access")
}

FACTS = HostFacts(
    hostname="h", os="Linux", kernel="6", architecture="x86_64", cpu_model="c", cpu_count=1,
    memory_bytes=1, disk_total_bytes=1, disk_free_bytes=1, boot_id="b", python_version="3.11",
    agent_version="0",
)  # fmt: skip
ENROLMENT = EnrollRequest(token="t", facts=FACTS, sent_at_ms=1)
ENROLLED = EnrollReply(
    host_id="h", name="n", credential="c", command_key="k", redis_url=None, server_time_ms=1
)


@pytest.mark.parametrize("is_older", [True, False])
def test_an_older_site_gets_the_inventory_that_it_knows(host_dir, is_older):
    gpu = GpuFacts(index=0, uuid="GPU-0", name="H100", memory_bytes=1, unread=("clocks: no",))
    facts = inventory.host_facts(host_dir.path).model_copy(
        update={"gpus": (gpu,), "other_gpus": (gpu,), "device_problems": ("lost",)}
    )
    received = []

    def answer(request: httpx.Request) -> httpx.Response:
        found = json.loads(request.content)["facts"]
        received.append(found)
        has_new = NEW_FACTS & set(found) or set(found["gpus"][0]) - OLD_GPU
        if is_older and has_new:
            return httpx.Response(422, json={"detail": "facts.other_gpus is not valid"})
        reply = BeatReply(server_time_ms=1) if "beat" in request.url.path else ENROLLED
        return httpx.Response(200, content=reply.model_dump_json())

    client = client_of(answer)
    beat = Beat(
        boot_id="b", sent_at_ms=1, agent_version="0", cpu_utilization=0.0, facts=facts,
        memory_available_bytes=1, disk_free_bytes=1,
    )  # fmt: skip

    assert client.beat(beat).server_time_ms == 1
    client.enroll(EnrollRequest(token="t", facts=facts, sent_at_ms=1))
    assert len(received) == (4 if is_older else 2)
    assert set(received[-1]["gpus"][0]) == (OLD_GPU if is_older else set(GpuFacts.model_fields))
    assert HostFacts.model_validate(received[-1]).gpus[0].name == "H100"  # an older agent's


def test_an_older_site_gets_the_caches_report_without_links_and_newer_facts_only_if_it_has_them():
    model = CachedModel(repository="org/name", commit="a" * 40, size_bytes=1)
    link = LinkReport(link="hub", address="h", bytes_per_second=2, low=1, high=3, num_transfers=2)
    reply = BeatReply(server_time_ms=1).model_dump_json()
    for links, num_calls in [((link,), 2), ((), 1)]:
        received = []

        def answer(request: httpx.Request, received=received) -> httpx.Response:
            received.append(json.loads(request.content))
            is_known = set(received[-1]["cache"]) == {"models", "pruned"}  # as that release had it
            return httpx.Response(200 if is_known else 422, content=reply if is_known else "{}")

        beat = Beat(
            boot_id="b", sent_at_ms=1, agent_version="0", cpu_utilization=0.0, facts=FACTS,
            memory_available_bytes=1, disk_free_bytes=1,
            cache=CacheReport(models=(model,), links=links),
        )  # fmt: skip
        assert client_of(answer).beat(beat).server_time_ms == 1
        assert len(received) == num_calls
        assert received[-1]["cache"]["models"][0]["repository"] == "org/name"
        assert set(received[-1]["facts"]) >= NEW_FACTS


RUN = RunRequest(
    attempt_id="a1",
    job_id="j",
    number=1,
    fence="f",
    spec=training(),
    devices=(RunDevice(kind="cpu", index=0, uuid="cpu"),),
    gang=Gang(
        node_rank=0, num_nodes=1, master_address="127.0.0.1", master_port=2000,
        own_address="127.0.0.1", rendezvous_id="r",
    ),
)  # fmt: skip
ORDERS = BeatReply(
    server_time_ms=1,
    wanted=(WantedAttempt(attempt_id="a1", fence="f", needs=Needs(kind="train")),),
    stop=(StopOrder(attempt_id="a2", reason=Reason.SUPERSEDED),),
    acked={"a1": 3},
    epoch=EpochShown(number=1, proof="0" * 64),
    environments=(EnvironmentOrder(name="vllm", action="build", order_id="o"),),
)
BEAT = Beat(
    boot_id="b", sent_at_ms=1, agent_version="0", cpu_utilization=0.0,
    memory_available_bytes=1, disk_free_bytes=1,
)  # fmt: skip
SECRETS = RotateRequest(credential_hash="0" * 64, redis_secret_hash="0" * 64)
REPLIES = {  # each reply that a host reads, and the call that reads it
    BeatReply: (ORDERS, lambda client: client.beat(BEAT)),
    ClaimReply: (ClaimReply(request=RUN), lambda client: client.claim("a1", CLAIM)),
    CopyState: (CopyState(is_active=True), lambda client: client.copy_state("c1")),
    EnrollReply: (ENROLLED, lambda client: client.enroll(ENROLMENT)),
    EventAck: (
        EventAck(attempt_id="a1", acked_seq=4), lambda client: client.send_events(BATCH),
    ),
    RotateReply: (
        RotateReply(command_key="k", redis_url=None, has_redis_user=False),
        lambda client: client.rotate(SECRETS),
    ),
    UploadState: (
        UploadState(received_bytes=7),
        lambda client: UploadState(
            received_bytes=client.received_bytes("a1", "model", PurePosixPath("weights"))
        ),
    ),
}  # fmt: skip


def replied(document: object, call):
    return call(client_of(lambda _: httpx.Response(200, json=document)))


def test_fields_of_a_newer_server_are_ignored_in_every_reply():
    read = set(re.findall(r"\b(\w+(?:Reply|Ack|State))\)", Path(shipping.__file__).read_text()))
    assert read == {shape.__name__ for shape in REPLIES}, "a reply that this table lacks"
    for shape, (reply, call) in REPLIES.items():
        newer = of_newer_server(reply.model_dump(mode="json"))
        with pytest.raises(ValidationError, match="from_a_newer_server"):
            shape.model_validate(newer)  # what others read stays strict
        found = replied(newer, call)
        if isinstance(found, ClaimReply):  # its list of paths has one more
            found = found.model_copy(update={"default_options": reply.default_options})
        assert found == reply, shape


def test_words_that_only_a_newer_server_knows_cost_no_other_order():
    newer = ORDERS.model_dump(mode="json")
    newer["stop"].append({"attempt_id": "a3", "reason": "grant_expired"})
    newer["environments"].append({"name": "vllm", "action": "rebuild", "order_id": "p"})
    found = replied(newer, REPLIES[BeatReply][1])
    assert [(each.attempt_id, each.reason) for each in found.stop] == [
        ("a2", Reason.SUPERSEDED), ("a3", Reason.STOPPED_BY_OPERATOR),
    ]  # fmt: skip
    assert found.environments == ORDERS.environments


@pytest.mark.parametrize("where", [(), ("data",)])
def test_an_unknown_option_of_a_job_is_refused_by_its_name_unless_it_has_its_default(where):
    document = ClaimReply(request=RUN).model_dump(mode="json")
    place = document["request"]["spec"]
    for name in where:
        place = place[name]
    place["teaches"] = "twice"
    call = REPLIES[ClaimReply][1]
    path = ".".join([*where, "teaches"])
    with pytest.raises(UnknownOptionsError, match=f"what the job sets: {path}") as refused:
        replied(document, call)
    assert refused.value.request == RUN
    document["default_options"] += [path]
    assert replied(document, call).request == RUN


def test_a_host_of_before_other_hubs_runs_a_job_of_the_hub_it_knows_and_of_no_other():
    for hub, is_refused in [("", False), ("huggingface", False), ("modelscope", True)]:
        model = HubModel(repository="org/name", revision="a" * 40, hub=hub)
        run = RUN.model_copy(update={"spec": BenchmarkSpec(model=model)})
        reply = ClaimReply(request=run).model_dump(mode="json")
        assert reply["request"]["spec"]["model"]["hub"] == hub  # newer hosts read it
        assert ("model.hub" not in reply["default_options"]) == is_refused, hub


def test_a_heartbeat_that_is_refused_for_another_reason_is_not_repeated_without_facts():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(422, json={"detail": "no"})

    beat = Beat(
        boot_id="b", sent_at_ms=1, agent_version="0", cpu_utilization=0.0,
        memory_available_bytes=1, disk_free_bytes=1,
    )  # fmt: skip
    with pytest.raises(RefusedError, match="422"):
        client_of(answer).beat(beat)
    assert len(seen) == 1


def test_a_turned_down_credential_is_told_from_other_refusals():
    for status in [401, 403]:
        client = client_of(lambda _, said=status: httpx.Response(said, text="no"))
        with pytest.raises(RefusedError) as refusal:
            client.claim("a1", CLAIM)
        assert refusal.value.is_unauthorized, status


def test_a_server_that_is_away_or_does_not_answer_in_time_is_unreachable():
    client = ServerClient("http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        client.claim("a1", CLAIM)

    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too slow")

    with pytest.raises(UnreachableError, match="did not answer in time"):
        client_of(answer).claim("a1", CLAIM)


def test_an_answer_of_another_form_asks_about_the_versions():
    for text in ["<html>", "{}", '{"attempt_id": "a1", "acked_seq": -1}']:
        client = client_of(lambda _, said=text: httpx.Response(200, text=said))
        with pytest.raises(ServerError, match="the same version"):
            client.send_events(BATCH)


def test_a_redirect_is_not_followed_and_a_long_refusal_is_cut():
    client = client_of(lambda _: httpx.Response(302, headers={"Location": "http://evil/"}))
    with pytest.raises(RefusedError, match="302"):
        client.claim("a1", CLAIM)
    client = client_of(lambda _: httpx.Response(422, json={"detail": "x" * 10_000}))
    with pytest.raises(RefusedError) as refusal:
        client.claim("a1", CLAIM)
    assert len(str(refusal.value)) < 500


def test_an_attempts_id_cannot_change_the_address():
    paths = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path.decode())
        return httpx.Response(409, json={})

    with pytest.raises(RefusedError):
        client_of(answer).claim("../hosts?x=", CLAIM)
    assert "?" not in paths[0]
