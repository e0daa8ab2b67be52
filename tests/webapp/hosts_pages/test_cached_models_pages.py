"""A host's models on its page and in the API: who sees, pins, deletes them, and the rule."""

import pytest

from tests.webapp.conftest import client_of
from webapp.audit.models import Event
from webapp.hosts.models import Host, HostModel

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
A, GIB = "a" * 40, 2**30
KEY = f"acme/tiny@{A}"


def make_model(host: Host, name: str = "tiny", **fields) -> HostModel:
    values = {"commit": A, "size_bytes": GIB, "num_files": 3, "is_complete": True}
    return HostModel.objects.create(host=host, repository=f"acme/{name}", **{**values, **fields})


@pytest.fixture
def model(host) -> HostModel:
    return make_model(host)


def page(user, host: Host) -> str:
    return client_of(user).get(f"/hosts/{host.slug}/").content.decode()


def post(user, host: Host, action: str, **fields) -> str:
    client = client_of(user)
    answer = client.post(f"/hosts/{host.slug}/models/{action}/", fields, follow=True)
    return answer.content.decode()


def test_the_page_lists_models_and_only_operators_change_them(alice, olga, charlie, host, model):
    make_model(host, "part", commit="", is_complete=False, size_bytes=5)
    assert "Files come at" not in page(alice, host)
    link = {"link": "hub", "address": "h.lan", "bytes_per_second": 5e7, "low": 4e7, "high": 6e7}
    Host.objects.filter(pk=host.pk).update(checks={"links": [link | {"num_transfers": 2}]})
    text = page(alice, host)
    assert "50 MB/s (40 to 60 MB/s), measured on the last 2 transfers from h.lan" in text
    for words in ("acme/tiny", A[:12], "unfinished download", "2 repositories, 1.00", "3 files"):
        assert words in text, words
    for action in ("pin", "unpin", "delete", "rule"):
        assert f"/models/{action}/" not in text
        for user, status in ((alice, 403), (charlie, 404)):
            answer = client_of(user).post(f"/hosts/{host.slug}/models/{action}/", {"model": KEY})
            assert answer.status_code == status
    assert client_of(charlie).get(f"/api/v1/hosts/{host.slug}/models").status_code == 404
    assert all(f"/models/{action}/" in page(olga, host) for action in ("pin", "delete", "rule"))


def test_an_operator_pins_deletes_keeps_and_is_told_why_not(olga, host, model):
    assert "acme/tiny stays on Box" in post(olga, host, "pin", model=KEY)
    assert "is pinned by olga; unpin it first" in post(olga, host, "delete", model=KEY)
    assert "no longer pinned" in post(olga, host, "unpin", model=KEY)
    assert "Box deletes acme/tiny after its next heartbeat" in post(
        olga, host, "delete", model=KEY
    )
    text = page(olga, host)
    assert "Waiting for the host to delete it" in text
    assert f"Deletion of acme/tiny@{A[:12]} requested" in text
    post(olga, host, "pin", model=KEY)
    assert "Waiting for the host to delete it" not in page(olga, host)
    assert "has no model" in post(olga, host, "pin", model="acme/none")


@pytest.mark.parametrize(
    ("typed", "kept"),
    [("1.5", 3 * GIB // 2), ("0", 0), ("", None), ("-1", 7), ("x", 7), ("0,5", 7)],
)
def test_the_rule_is_set_on_the_page_and_a_wrong_one_is_refused(olga, host, typed, kept):
    Host.objects.filter(pk=host.pk).update(keep_models_bytes=7)
    text = post(olga, host, "rule", keep_gib=typed)
    assert Host.objects.get(pk=host.pk).keep_models_bytes == kept
    assert 'type="number" name="keep_gib"' not in text  # of 0,5 a browser sends 5
    assert ("it can be 0 to 1,073,741,824 GiB" in text) is (kept == 7)
    assert Event.objects.filter(kind="host.models_rule").exists() is (kept != 7)


def test_the_api_lists_pins_deletes_and_sets_the_rule(olga, host, model):
    client, path = client_of(olga), f"/api/v1/hosts/{host.slug}/models"

    def sent(method: str, where: str = path, body: dict | None = None):
        return getattr(client, method)(where, body, content_type="application/json").json()

    (item,) = client.get(path).json()["items"]
    assert (item["repository"], item["commit"], item["size_bytes"], item["last_job"]) == (
        "acme/tiny", A, GIB, None,
    )  # fmt: skip
    assert sent("post", body={"model": "acme/tiny"})["items"][0]["pinned_by"] == "olga"
    assert client.delete(f"{path}?model=acme/tiny").json()["code"] == "pinned"
    sent("post", body={"model": "acme/tiny", "is_pinned": False})
    assert client.delete(f"{path}?model=acme/tiny").json()["items"][0]["is_deleting"]
    for gib, kept in ((2.5, 5 * GIB // 2), (None, None)):
        sent("put", f"{path}/rule", {"keep_gib": gib})
        assert Host.objects.get(pk=host.pk).keep_models_bytes == kept
    assert sent("put", f"{path}/rule", {"keep_gib": -1})["code"] == "invalid"


def test_the_page_asks_as_often_for_many_models_as_for_one(
    olga, host, model, django_assert_num_queries, django_assert_max_num_queries
):
    client, path = client_of(olga), f"/hosts/{host.slug}/"
    client.get(path)
    with django_assert_max_num_queries(60) as one:
        client.get(path)
    for number in range(30):
        make_model(host, f"m{number}")
    with django_assert_num_queries(len(one.captured_queries)):
        text = client.get(path).content.decode()
    assert "The largest 20 of 31" in text


def test_an_operator_copies_a_model_from_another_host_and_stops_it(
    alice, olga, charlie, host, other_host, model
):
    model.host = other_host
    model.save()
    target = f"/hosts/{host.slug}/copies"
    text = page(olga, host)
    assert f"acme/tiny@{A[:12]} on Box 2, 1.00" in text
    assert f"slipway models push FOLDER {host.slug}" in text
    assert "/copies/begin/" not in page(alice, host)
    chosen = {"model": f"{other_host.slug} {KEY}"}
    for user, status in ((alice, 403), (charlie, 404)):
        assert client_of(user).post(f"{target}/begin/", chosen).status_code == status
    client = client_of(olga)
    answer = client.post(f"{target}/begin/", chosen, follow=True).content.decode()
    assert "Box 2 sends acme/tiny to Box at its next heartbeat" in answer
    assert "at its next heartbeat" in page(alice, host)
    copy = client.get(f"/api/v1/hosts/{host.slug}/copies").json()["items"][0]
    assert (copy["source"], copy["state"], copy["size_bytes"]) == (other_host.slug, "active", 0)
    begun = {"model": KEY, "source": other_host.slug}
    again = client.post(f"/api/v1/hosts/{host.slug}/copies", begun, "application/json")
    assert (again.status_code, again.json()["id"]) == (201, copy["id"])
    answer = client.post(f"{target}/{copy['id']}/stop/", follow=True).content.decode()
    assert "The copy of acme/tiny to Box is stopped" in answer
    assert f"Copy of acme/tiny@{A[:12]} stopped" in answer
    for posted, words in (
        ("none x/y", "has no host"),
        (f"{other_host.slug} x/y", "no whole model"),
    ):
        answer = client.post(f"{target}/begin/", {"model": posted}, follow=True)
        assert words in answer.content.decode()
    for body, words in (
        ({"model": "acme/x"}, "Give model as org/name@commit with the files"),
        ({"model": "acme/x@12", "files": [{"path": "a", "size_bytes": 1, "etag": A}]}, "40 hex"),
        ({**begun, "revision": "main"}, "not both"),
    ):
        answer = client.post(f"/api/v1/hosts/{host.slug}/copies", body, "application/json")
        assert (answer.status_code, words in answer.json()["detail"]) == (422, True), answer.json()
