"""Networks from which the administration is reachable.

The settings import this module, so it does not import Django. The checked address is the one that
the web server reports. Behind a proxy it is the client's only if the server trusts the proxy: one
on this machine if SLIPWAY_PUBLIC_URL is set, or those of FORWARDED_ALLOW_IPS.
"""

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NetworksError(ValueError):
    """SLIPWAY_ADMIN_NETWORKS contains an invalid network."""


def networks(text: str) -> tuple[Network, ...]:
    """Return the networks of a comma-separated list; an empty list allows every network.

    Raises:
        NetworksError: a network is invalid, or has bits beyond its prefix length.
    """
    try:
        return tuple(
            ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()
        )
    except ValueError as error:
        raise NetworksError(
            f"SLIPWAY_ADMIN_NETWORKS is {text!r}: {error}. Give addresses and networks separated "
            "by commas, such as 10.0.0.0/8,192.0.2.7, or unset the variable."
        ) from error


def lies_in(address: str, allowed: tuple[Network, ...]) -> bool:
    """Return whether an address is allowed; an invalid one only without a list."""
    if not allowed:
        return True
    try:
        parsed: Address = ipaddress.ip_address(address)
    except ValueError:
        return False
    inner = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(inner in network for network in allowed)
