"""Calls to the server: what comes back, and one sentence for each thing that goes wrong."""

import json

import httpx
import pytest

from runners import inventory
from runners.client import RefusedError, ServerClient, ServerError, UnreachableError
from runners.facts import GpuFacts, HostFacts
from runners.messages import Beat, BeatReply, ClaimRequest, EnrollReply, EnrollRequest, EventBatch

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


@pytest.mark.parametrize(
    ("status", "words", "wait"),
    [
        pytest.param(429, "7", 7.0, id="too-many"),
        pytest.param(503, "30", 30.0, id="busy"),
        pytest.param(429, "Wed, 21 Oct 2026 07:28:00 GMT", None, id="a-date"),
        pytest.param(401, "7", None, id="refused-for-good"),
    ],
)
def test_a_refusal_says_how_long_to_wait_where_the_server_did(status, words, wait):
    answer = httpx.Response(status, headers={"Retry-After": words}, json={"detail": "no"})

    with pytest.raises(RefusedError) as refusal:
        client_of(lambda _: answer).claim("a1", CLAIM)

    assert refusal.value.retry_after_seconds == wait


# The inventory's fields as sites knew them before vendors, links and problems were added.
OLD_GPU = {
    *("index", "uuid", "name", "memory_bytes", "compute_capability", "power_limit_watts"),
    *("pci_bus_id", "pcie_width", "pcie_max_width", "numa_node", "has_ecc", "needs_reset"),
    *("ecc_corrected_errors", "ecc_uncorrected_errors", "is_worn_out", "is_partitioned", "xids"),
}
NEW_FACTS = {
    *("rocm_version", "torch_rocm_version", "other_gpus", "device_problems", "peer_access"),
}

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


@pytest.mark.parametrize("status", [401, 403])
def test_a_turned_down_credential_is_told_from_other_refusals(status):
    client = client_of(lambda _: httpx.Response(status, text="no"))

    with pytest.raises(RefusedError) as refusal:
        client.claim("a1", CLAIM)
    assert refusal.value.is_unauthorized


def test_a_server_that_is_away_is_unreachable():
    client = ServerClient("http://127.0.0.1:9")

    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        client.claim("a1", CLAIM)


def test_a_server_that_does_not_answer_in_time_is_unreachable():
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too slow")

    with pytest.raises(UnreachableError, match="did not answer in time"):
        client_of(answer).claim("a1", CLAIM)


@pytest.mark.parametrize("text", ["<html>", "{}", '{"attempt_id": "a1", "acked_seq": -1}'])
def test_an_answer_of_another_form_asks_about_the_versions(text):
    client = client_of(lambda _: httpx.Response(200, text=text))

    with pytest.raises(ServerError, match="the same version"):
        client.send_events(BATCH)


def test_a_redirect_is_not_followed():
    client = client_of(lambda _: httpx.Response(302, headers={"Location": "http://evil/"}))

    with pytest.raises(RefusedError, match="302"):
        client.claim("a1", CLAIM)


def test_an_attempts_id_cannot_change_the_address():
    paths = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path.decode())
        return httpx.Response(409, json={})

    with pytest.raises(RefusedError):
        client_of(answer).claim("../hosts?x=", CLAIM)
    assert "?" not in paths[0]


def test_a_long_refusal_is_cut():
    client = client_of(lambda _: httpx.Response(422, json={"detail": "x" * 10_000}))

    with pytest.raises(RefusedError) as refusal:
        client.claim("a1", CLAIM)
    assert len(str(refusal.value)) < 500
