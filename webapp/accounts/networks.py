"""Networks from which the administration is reachable.

The networks are those of SLIPWAY_ADMIN_NETWORKS. The checked address is the one that the web
server reports. Behind a proxy it is the client's only if the server trusts the proxy: one
on this machine if SLIPWAY_PUBLIC_URL is set, or those of FORWARDED_ALLOW_IPS.
"""

import ipaddress

from runners.shared.addresses import Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


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
