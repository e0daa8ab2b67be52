"""What the Hub says of a repository, and every way in which it does not."""

import hashlib
import json
import socket
from contextlib import closing
from dataclasses import replace

import pytest

from runners.hub.errors import HubError, wait_seconds
from runners.hub.listing import check_access, look_up, read_config, read_file
from runners.hub.names import parse
from tests.hub.hub_server import Hub
from tests.hub.models import write_files
from tests.runners.hub.conftest import FILES, REPOSITORY, SIZE, WEIGHTS
from tests.webapp.core.test_log_collector import self_signed

CHANGED = {"config.json": '{"model_type": "qwen3"}'}


def refused(settings, text: str = REPOSITORY) -> HubError:
    """Return why a repository is not looked up or not given."""
    with pytest.raises(HubError) as error:
        check_access(look_up(parse(text), settings, 1.0), settings, 1.0)
    assert settings.token not in str(error.value).split()
    return error.value


def test_a_listing_has_commit_sizes_and_digests(hub, looked_up):
    (hub.folder / REPOSITORY / "card.json").write_text('{"cardData": {"license": "mit"}}')
    found = looked_up()
    assert found.commit == hub.commit(REPOSITORY)
    assert found.paths == frozenset(FILES)
    assert (found.revision, found.licence, found.gated) == ("main", "mit", "")
    data = (hub.folder / REPOSITORY / WEIGHTS).read_bytes()
    weights, config = found.file(WEIGHTS), found.file("config.json")
    assert (weights.size, weights.sha256) == (SIZE, hashlib.sha256(data).hexdigest())
    assert weights.etag == weights.sha256
    assert (len(config.etag), config.sha256) == (40, "")
    assert looked_up(f"{REPOSITORY}@{found.commit}") == replace(found, revision="")


def test_each_failure_of_a_look_up_has_a_kind_and_a_way_out(hub, settings):
    hub.tokens = {"hf_member", "hf_admitted"}
    hub.admitted = {"hf_admitted"}
    hub.gated = {"acme/gated": "manual"}
    hub.private = {"acme/private"}
    hub.renamed = {"acme/old": REPOSITORY}
    for name in ("acme/gated", "acme/private"):
        write_files(hub.folder / name, FILES)
    member = {"token": "hf_member"}
    cases = {
        "no such repository": ("acme/none", {}, "absent", "correct its name.*if it is private"),
        "none for a member": ("acme/none", member, "absent", "has no repository 'acme/none'"),
        "private": ("acme/private", {}, "absent", "a token that may read it into the secret"),
        "revision": (
            f"{REPOSITORY}@v9",
            {},
            "absent",
            "has no repository .* at revision 'v9': name a branch",
        ),
        "renamed": ("acme/old", {}, "absent", "was renamed: it is 'acme/tiny' now"),
        "gated": ("acme/gated", {}, "gated", f"{hub.url}/acme/gated says who .* secret HF_TOKEN"),
        "gated for a member": ("acme/gated", member, "gated", "request access there with the acc"),
        "revoked": (REPOSITORY, {"token": "hf_old"}, "unauthorised", "was revoked, has expired"),
        "offline by wish": (REPOSITORY, {"is_offline": True}, "offline", "HF_HUB_OFFLINE is set"),
    }
    for case, (text, fields, kind, words) in cases.items():
        error = refused(replace(settings, **fields), text)
        assert (error.kind, case) == (kind, case)
        with pytest.raises(HubError, match=words):
            raise error
    assert refused(settings, "acme/old").new_name == REPOSITORY
    check_access(look_up(parse("acme/gated"), settings), replace(settings, token="hf_admitted"))


def test_each_answer_that_is_not_the_hubs_has_a_kind(hub, settings, monkeypatch):
    def answers(**faults: object) -> HubError:
        for name, value in faults.items():
            setattr(hub, name, value)
        return refused(settings)

    limited = answers(limited=["17"])
    assert (limited.kind, limited.retry_after) == ("rate_limited", 17.0)
    for faults, kind, words in (
        ({"failing": [503]}, "mirror", "answers status 503 for .*: correct HF_ENDPOINT"),
        ({"failing": [403]}, "unauthorised", "may not read it, or it is disabled"),
        ({"page": b"<html>Log in"}, "mirror", "answers no JSON for"),
        ({"page": b"[1]"}, "mirror", "no JSON object"),
        ({"page": b'{"sha": "x", "siblings": []}'}, "mirror", "no commit"),
    ):
        error = answers(**faults)
        assert error.kind == kind, faults
        with pytest.raises(HubError, match=words):
            raise error
    for sibling in (
        {"rfilename": "../x", "size": 1, "blobId": "a" * 40},
        {"rfilename": "x"},
        {"rfilename": "x", "size": 1, "blobId": "../../x"},
        {"rfilename": "x", "size": -1, "blobId": "a" * 40},
        {"rfilename": "x", "size": 1, "lfs": {"sha256": "a" * 40, "size": 1}},
    ):
        page = json.dumps({"sha": "a" * 40, "siblings": [sibling]}).encode()
        assert answers(page=page).kind == "mirror", sibling


def test_a_hub_that_is_not_reached_is_named_with_what_to_change(settings, tmp_path, monkeypatch):
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{silent.getsockname()[1]}"
        try:
            int("two")
        except ValueError:  # a request made meanwhile has a cause of its own
            error = refused(replace(settings, endpoint=closed))
        assert (error.kind, "Connection refused" in str(error)) == ("offline", True)
        silent.listen()
        error = refused(replace(settings, endpoint=closed))
        assert (error.kind, "no answer in time" in str(error)) == ("offline", True)
    pem = self_signed(tmp_path)
    with Hub(tmp_path / "repositories", certificate=(pem, pem)) as hub:
        error = refused(replace(settings, endpoint=hub.url))
        assert (error.kind, "SSL_CERT_FILE" in str(error)) == ("tls", True)
        trusting = replace(settings, endpoint=hub.url, authorities=pem)
        assert look_up(parse(REPOSITORY), trusting).commit == hub.commit(REPOSITORY)


def test_a_proxy_that_refuses_is_named(hub, settings, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    far = replace(settings, endpoint="http://hub.example.org", proxy="the proxy P of HTTP_PROXY")
    hub.failing = [407]
    error = refused(far)
    assert (error.kind, "the proxy P of HTTP_PROXY asks for" in str(error)) == ("proxy", True)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    error = refused(far)
    assert (error.kind, "correct HTTPS_PROXY" in str(error)) == ("proxy", True)
    assert look_up(parse(REPOSITORY), settings).commit  # this machine is asked without it


def test_a_config_is_read_verified_and_within_its_limit(hub, settings, looked_up):
    found = looked_up()
    assert read_config(found, settings) == {"model_type": "llama"}
    with pytest.raises(HubError, match="has 23 bytes, and at most 22 are read"):
        read_file(found, "config.json", settings, 22)
    with pytest.raises(HubError, match=r"has no file 'x\.json' of repository 'acme/tiny'"):
        read_file(found, "x.json", settings, 22)
    hub.corrupted["config.json"] = 1
    with pytest.raises(HubError, match="arrived with digest") as wrong:
        read_config(found, settings)
    assert wrong.value.kind == "wrong_digest"
    write_files(hub.folder / "acme/broken", {"config.json": '{"a": 1'})
    with pytest.raises(HubError, match=r"config\.json is not valid JSON.*another repository"):
        read_config(looked_up("acme/broken"), settings)


def test_a_config_is_that_of_the_commit_that_was_looked_up(hub, settings, looked_up):
    found = looked_up()
    write_files(hub.folder / REPOSITORY, CHANGED)
    assert looked_up().commit != found.commit
    assert read_config(found, settings) == {"model_type": "llama"}


def test_code_of_a_repository_is_seen_in_its_listing(hub, looked_up):
    write_files(hub.folder / "acme/coded", {"config.json": '{"auto_map": {"AutoModel": "m.M"}}'})
    assert looked_up("acme/coded").needs_remote_code
    assert not looked_up().needs_remote_code


def test_a_wait_is_read_as_servers_write_it():
    for headers, low, high in (
        ({"retry-after": "7"}, 7, 7),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0, 0),
        ({"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT"}, 3600, 3600),
        ({"retry-after": "soon"}, 10, 10),
        ({"ratelimit": '"api";r=0;t=55'}, 55, 55),
        ({"ratelimit": '"api";r=3;t=55'}, 10, 10),
        ({}, 10, 10),
    ):
        assert low <= wait_seconds(headers) <= high, headers
