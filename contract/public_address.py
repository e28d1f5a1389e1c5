"""Which addresses are of the public Internet: URLs of strangers may lead nowhere else."""

import ipaddress

#: NAT64 (RFC 6052): the last 32 bits are an IPv4 address.
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(host: str) -> bool:
    """Return whether an IP address is one of the public Internet, also where IPv6 wraps it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast
