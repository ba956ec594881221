"""Ports for servers that tests start."""

import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody uses, below the range from which the kernel serves outgoing sockets."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
