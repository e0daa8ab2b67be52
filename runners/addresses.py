"""Types of numeric IP addresses and ports."""

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field


def _plain_address(text: str) -> str:
    return str(ipaddress.ip_address(text))


IpAddress = Annotated[str, AfterValidator(_plain_address)]
Port = Annotated[int, Field(ge=1024, le=65535)]
