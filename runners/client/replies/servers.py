"""Replies about observed servers: what somebody else started, and what was read of it."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply

ServerStateWord = Open[Literal["unknown", "serving", "silent"]]


class ServedModelReply(Reply):
    """A model that a server lists."""

    name: Annotated[str, Field(description="That clients give as their model")]
    root: Annotated[str, Field(description="Its repository or folder; empty: not said")]
    max_model_len: Annotated[
        int | None, Field(description="Tokens of its longest request; null: not said")
    ]
    slots: Annotated[
        int | None,
        Field(description="Slots with that many tokens each, of llama.cpp; null: not said"),
    ] = None


class ServerWindow(Reply):
    """What a server did in the last ten minutes; empty until two looks found figures."""

    seconds: float
    requests: Annotated[float | None, Field(description="That ended; null: not counted")]
    in_flight: Annotated[
        float | None, Field(description="Mean requests that ran or waited, where any did")
    ]
    busy_ratio: Annotated[float | None, Field(description="Share of looks that found requests")]
    input_tokens: Annotated[float | None, Field(description="Mean prompt of a request")]
    output_tokens: Annotated[float | None, Field(description="Mean answer of a request")]
    figures: Annotated[
        dict[str, float], Field(description="By name, in the unit of the name's ending")
    ]


class ServerFigure(Reply):
    """A measured figure beside what the server's plan says at the measured load."""

    name: str
    measured: float
    predicted: Annotated[float | None, Field(description="Modelled; null: not comparable")]
    low: Annotated[float | None, Field(description="Of the 80 % interval")]
    high: float | None
    note: Annotated[str, Field(description="Why it is not compared")]


class ServerReply(Reply):
    """An observed server, as of the last look."""

    id: str
    name: str
    address: Annotated[str, Field(description="Of the server, without /v1")]
    team: Annotated[str, Field(description="Id of the team")]
    owner: Annotated[str, Field(description="Who added it; empty if the account is deleted")]
    has_key: Annotated[bool, Field(description="It is asked with a key, which is not returned")]
    plan: Annotated[str | None, Field(description="Id of the plan beside it")]
    host: Annotated[str, Field(description="Slug of the host that it runs on; empty: not said")]
    created_at: datetime
    state: ServerStateWord
    engine: Annotated[str, Field(description="Such as vllm; empty: not recognised")]
    release: str
    models: list[ServedModelReply]
    looked_at: datetime | None
    answered_at: datetime | None
    silent_since: Annotated[datetime | None, Field(description="Null: it answers")]
    problem: Annotated[str, Field(description="Why it does not answer, or has no figures")]
    figures: Annotated[
        dict[str, float], Field(description="Since the look before, by name as in the charts")
    ]
    window: ServerWindow
    url: str


class ServerDetail(ServerReply):
    """An observed server, with what its plan says."""

    compared: Annotated[
        list[ServerFigure], Field(description="The window beside the plan; calibrates nothing")
    ]
    compared_concurrency: Annotated[
        int | None, Field(description="Requests in flight for which the plan was asked")
    ]


class ServerPage(PageReply[ServerReply]):
    """A page of observed servers."""
