"""The key-value store through which the processes of a job meet.

It is ``torch.distributed.TCPStore``: the launcher holds the server, each process connects. A client
serves one caller at a time and waits inside the call, so each waiting thread borrows a client of
its own.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import socket
import threading
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import torch.distributed as dist

# Longer than any job waits, in milliseconds still a C int.
FOREVER = datetime.timedelta(days=20)
# The server refuses values of more than 8 MiB with some back ends
# (measured on 2.5 and 2.9), so long values go in pieces.
PIECE = 4 << 20
_NO_VALUE = "pjrt_compat: no value"
_LOOPBACK = "127.0.0.1"
PORT_VARIABLE = "PJRT_COMPAT_PORT"


class StoreAddress(NamedTuple):
    host: str
    port: int


def _back_end() -> Dict[str, Any]:
    # The libuv back end refuses a listening socket (2.5) and long values (2.9).
    if "use_libuv" in (inspect.getdoc(dist.TCPStore.__init__) or ""):
        return {"use_libuv": False}
    return {}


class StoreServer:
    """The server; it lives as long as this object."""

    def __init__(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_LOOPBACK, int(os.environ.get(PORT_VARIABLE, "0"))))
        listener.listen(1024)
        self.address = StoreAddress(_LOOPBACK, listener.getsockname()[1])
        self.store: Any = dist.TCPStore(
            self.address.host,
            self.address.port,
            None,
            True,
            FOREVER,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
            **_back_end(),
        )

    def close(self) -> None:
        """Ends the server here and now.

        Left to the garbage collector it might be found by that of a forked child, which would wait
        for a server thread that it does not have.
        """
        self.store = None


class StoreClients:
    """Connections of this process, lent to one thread at a time."""

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self._idle: List[Any] = []
        self._lock = threading.Lock()

    def connect(self) -> Any:
        return dist.TCPStore(
            self.address.host,
            self.address.port,
            None,
            False,
            FOREVER,
            wait_for_workers=False,
            **_back_end(),
        )

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Any]:
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = self.connect()
        yield client
        # Not returned after an exception: the connection may be in the middle of an answer.
        with self._lock:
            self._idle.append(client)


def put_long(client: Any, key: str, value: bytes) -> int:
    """Stores ``value`` in pieces under ``key/0``, ``key/1``, ...; returns their number."""
    count = max(1, -(-len(value) // PIECE))
    for index in range(count):
        client.set("{}/{}".format(key, index), value[index * PIECE : (index + 1) * PIECE])
    return count


def get_long(client: Any, key: str, count: int) -> bytes:
    return b"".join(client.get("{}/{}".format(key, index)) for index in range(count))


def delete_long(client: Any, key: str, count: int) -> None:
    for index in range(count):
        client.delete_key("{}/{}".format(key, index))


def look_up(client: Any, key: str) -> Optional[bytes]:
    """The value of ``key``, or None when there is none; never waits.

    ``TCPStore.check`` is missing in torch 2.1. Comparing with a value that no key has answers
    with what the key holds, or with that value, and changes nothing.
    """
    found: bytes = client.compare_set(key, _NO_VALUE, _NO_VALUE)
    return None if found == _NO_VALUE.encode() else found


def poll_for(client: Any, key: str, seconds: float) -> bool:
    """Whether ``key`` appears within ``seconds``.

    It asks again and again: a wait inside the store that runs into its time limit makes torch print
    warnings (2.6 and later).
    """
    deadline = time.monotonic() + seconds
    while look_up(client, key) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
