# SPDX-License-Identifier: MIT
"""Unix sockets that only one user's processes can connect to."""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["UNHEARD", "is_this_user", "listen"]

UNHEARD = ".new"
"""Suffix of a socket's name until a server listens on it."""


def listen(address: str) -> socket.socket:
    """Creates a listening socket whose name appears only once it listens.

    A name that refuses connections is therefore stale.

    Raises:
        OSError: the socket cannot be created there; nothing is left behind.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(address + UNHEARD)
        os.chmod(address + UNHEARD, 0o600)
        made.listen(16)
        os.rename(address + UNHEARD, address)
    except BaseException:
        made.close()
        raise
    return made


def is_this_user(peer: socket.socket) -> bool:
    """Returns true if the peer of a Unix socket is a process of this user or of root."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)
