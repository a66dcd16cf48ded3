"""Which addresses belong to everybody: what a server may fetch for whoever asks."""

import ipaddress

# They carry an IPv4 address in their last bytes: what a gateway makes of it is what counts.
_CARRIERS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))


def is_public(address: str) -> bool:
    """address: of IPv4 or IPv6, with or without a zone."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if any(parsed in carrier for carrier in _CARRIERS):
            inner = ipaddress.IPv4Address(parsed.packed[-4:])
        if inner:
            return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast
