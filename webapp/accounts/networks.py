"""From which networks the administration may be opened; no Django, the settings are made of it.

The address that counts is the one that the web server names. Behind a proxy that is the client's
only where the server trusts the proxy: one on this machine, or those of FORWARDED_ALLOW_IPS.
"""

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NetworksError(ValueError):
    """SLIPWAY_ADMIN_NETWORKS names something that is no network."""


def networks(text: str) -> tuple[Network, ...]:
    """Return the networks of a comma-separated list; none: every network is let in.

    Raises:
        NetworksError: one of them is no network, or has bits beyond its length.
    """
    try:
        return tuple(
            ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()
        )
    except ValueError as error:
        raise NetworksError(
            f"SLIPWAY_ADMIN_NETWORKS is {text!r}: {error}. Give addresses and networks with "
            "commas between them, such as 10.0.0.0/8,192.0.2.7, or leave it unset."
        ) from error


def lies_in(address: str, allowed: tuple[Network, ...]) -> bool:
    """Return whether an address may come in; one that is none comes in only without a list."""
    if not allowed:
        return True
    try:
        asked: Address = ipaddress.ip_address(address)
    except ValueError:
        return False
    inner = getattr(asked, "ipv4_mapped", None) or asked
    return any(inner in network for network in allowed)
