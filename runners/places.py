"""Where the processes of one job meet: addresses, ports, and each host's place among them."""

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from runners.jobspec import JobDocument


def _plain_address(text: str) -> str:
    return str(ipaddress.ip_address(text))


IpAddress = Annotated[str, AfterValidator(_plain_address)]
Port = Annotated[int, Field(ge=1024, le=65535)]


class Gang(JobDocument):
    """One host's place in a job that runs on several devices or hosts."""

    node_rank: NonNegativeInt
    num_nodes: PositiveInt
    num_processes: PositiveInt = 1  # ranks on this host
    master_address: IpAddress
    master_port: Port
    own_address: IpAddress
    rendezvous_id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
