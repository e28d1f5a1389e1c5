"""Checks whether an IP address is public; URLs that clients give may lead to no other address."""

import ipaddress

#: The network of NAT64 (RFC 6052), whose addresses end with the 32 bits of an IPv4 address.
NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Networks that are not public although `is_global` is true in Python: IPv4-compatible, local NAT64
#: (RFC 8215), site-local, the IETF's protocol assignments, and 6to4 relays.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, (
    "::/96", "64:ff9b:1::/48", "fec0::/10", "192.0.0.0/24", "192.88.99.0/24",
)))  # fmt: skip


def is_public(host: str) -> bool:
    """Return whether an IP address is public.

    An IPv6 address that contains an IPv4 address is public if the IPv4 address is.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is not None:
            return is_public(str(inner))
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast
