"""Where the processes of one job are: devices, addresses, ports, each host's place among them."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from runners.addresses import IpAddress, Port
from runners.jobspec import JobDocument
from runners.wire import Message


class Gang(JobDocument):
    """One host's place in a job that runs on several devices or hosts."""

    node_rank: NonNegativeInt
    num_nodes: PositiveInt
    num_processes: PositiveInt = 1  # ranks on this host
    master_address: IpAddress
    master_port: Port
    own_address: IpAddress
    rendezvous_id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    key: str = Field(default="", pattern=r"^([0-9a-f]{64})?$", repr=False)  # of a chain's messages


class RunDevice(Message):
    """A device that an attempt holds: what it computes on, and nothing else."""

    kind: Literal["gpu", "cpu", "slot"]
    index: NonNegativeInt
    uuid: str
