"""Replies are the server's and the client's: strict for the one, open for the other."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from typing_extensions import TypeAliasType

from runners.client import ApiError, Slipway, replies
from runners.client.replies.base import Open, Reply
from runners.client.replies.jobs import JobReply
from runners.client.replies.team import MemberReply

OPEN = get_args(Open)[1]  # the mark


def all_replies() -> Iterator[type[BaseModel]]:
    for module in pkgutil.iter_modules(replies.__path__):
        for each in vars(importlib.import_module(f"{replies.__name__}.{module.name}")).values():
            if isinstance(each, type) and issubclass(each, Reply):
                yield each


def closed_words(kind: Any) -> Iterator[Any]:
    """Yield the sets of words in an annotation that have no other beside them."""
    if isinstance(kind, TypeAliasType):
        yield from closed_words(kind.__value__)
    elif get_origin(kind) is Literal:
        yield kind
    elif not (get_origin(kind) is Annotated and type(OPEN) in map(type, kind.__metadata__)):
        for inner in get_args(kind):
            yield from closed_words(inner)


def test_a_newer_server_may_have_more_words_in_every_field():
    found = list(all_replies())
    assert len(found) > 80
    for reply in found:
        for name, kind in get_type_hints(reply, include_extras=True).items():
            assert not list(closed_words(kind)), (reply.__name__, name)
    assert list(closed_words(list[Literal["a"] | None]))


MEMBER = {"user": "ada", "role": "emperor", "news": {"a": 1}}


def client_of(*members: dict) -> Slipway:
    reply = httpx.Response(200, json={"items": [*members]})
    wire = httpx.MockTransport(lambda _request: reply)
    return Slipway("https://slipway.lan", "slp_x", client=httpx.Client(transport=wire))


def test_a_client_reads_a_word_and_a_field_of_a_newer_server_and_writes_the_word_on():
    (member,) = client_of(MEMBER).list_members().items
    assert (member.role, member.model_dump()) == ("emperor", {"user": "ada", "role": "emperor"})
    assert member.model_dump_json() == '{"user":"ada","role":"emperor"}'
    with pytest.raises(ApiError, match="not one that this client knows"):
        client_of(MEMBER | {"role": 3}).list_members()


def test_a_server_sends_known_words_alone():
    for kind in (MemberReply, JobReply):
        fields = dict.fromkeys(kind.model_fields, "a")
        with pytest.raises(ValidationError, match="literal_error"):
            kind(**fields)
    with pytest.raises(ValidationError, match="literal_error"):
        MemberReply.model_validate_json('{"user": "ada", "role": "emperor"}')
