"""What a host says of its named environments, and what an operator wants done with one."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, StringConstraints

from runners.wire import Message

MAIN = "main"  # the interpreter that the agent itself runs in
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
EnvironmentStage = Literal["absent", "building", "ready", "failed", "outdated"]


class EnvironmentState(Message):
    """One environment as it lies on the host's disk."""

    name: EnvironmentName
    stage: EnvironmentStage
    purpose: str = Field(default="", max_length=400)
    size_bytes: NonNegativeInt = 0  # of a built one as measured, else as its pins say
    num_packages: NonNegativeInt = 0
    words: str = Field(default="", max_length=600)  # the step of a build, or why it failed
    done: NonNegativeInt = 0  # steps of a build
    total: NonNegativeInt = 0
    is_tried: bool = True  # False: nobody of us ever built it
    order_id: str = Field(default="", max_length=40)  # the last order that was carried out


class EnvironmentOrder(Message):
    """Build or remove an environment; asked again until the host says that it did."""

    name: EnvironmentName
    action: Literal["build", "remove"]
    order_id: str = Field(max_length=40)
