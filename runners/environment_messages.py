"""States of a host's named environments, and an operator's orders for them."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, StringConstraints

from runners.wire import Message

MAIN = "main"  # the interpreter that the agent itself runs in
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
EnvironmentStage = Literal["absent", "building", "ready", "failed", "outdated"]


class EnvironmentState(Message):
    """The state of one environment on the host's disk."""

    name: EnvironmentName
    stage: EnvironmentStage
    purpose: str = Field(default="", max_length=400)
    size_bytes: NonNegativeInt = 0  # measured if built, else as stated by its pins
    num_packages: NonNegativeInt = 0
    words: str = Field(default="", max_length=600)  # the step of a build, or why it failed
    done: NonNegativeInt = 0  # steps of a build
    total: NonNegativeInt = 0
    is_tried: bool = True  # False: never built by the project
    order_id: str = Field(default="", max_length=40)  # the last order that was carried out


class EnvironmentOrder(Message):
    """Order to build or remove an environment; repeated until the host confirms it."""

    name: EnvironmentName
    action: Literal["build", "remove"]
    order_id: str = Field(max_length=40)
