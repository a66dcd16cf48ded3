"""Which IP addresses are public, so that a server may fetch from them for a client."""

import ipaddress

# IPv6 networks with an IPv4 address in the last bytes; a gateway sends packets to that address.
_CARRIERS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))


def is_public(address: str) -> bool:
    """Returns True if the IPv4 or IPv6 address, with or without a zone, is public."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if any(parsed in carrier for carrier in _CARRIERS):
            inner = ipaddress.IPv4Address(parsed.packed[-4:])
        if inner:
            return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast
