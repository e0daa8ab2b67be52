"""Placement of a job's processes: devices, addresses, ports and node ranks."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from runners.addresses import IpAddress, Port
from runners.jobspec import JobDocument
from runners.wire import Message


class Gang(JobDocument):
    """One host's part of a distributed job: node rank, rendezvous and addresses."""

    node_rank: NonNegativeInt
    num_nodes: PositiveInt
    num_processes: PositiveInt = 1  # ranks on this host
    master_address: IpAddress
    master_port: Port
    own_address: IpAddress
    rendezvous_id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    key: str = Field(
        default="", pattern=r"^([0-9a-f]{64})?$", repr=False
    )  # authenticates a stage chain's messages


class RunDevice(Message):
    """A device that is allocated to an attempt."""

    kind: Literal["gpu", "cpu", "slot"]
    index: NonNegativeInt
    uuid: str
