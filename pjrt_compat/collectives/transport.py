"""Bytes between the processes of a job: point-to-point messages of a gloo process group."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any, Iterator, List, Optional

import torch
import torch.distributed as dist

from pjrt_compat.replicas import store as stores
from pjrt_compat.replicas.rendezvous import MeetingPlace

_LOOPBACK = "127.0.0.1"


class Transport:
    """Connects every process of the job to every other one.

    It is made when replicas of different processes first exchange tensors, by all processes
    together (gloo connects them pairwise through the store).
    """

    def __init__(self, place: MeetingPlace) -> None:
        assert place.clients is not None
        self._client = place.clients.connect()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        # How long a replica may wait is decided where replicas meet, before any message is sent.
        options._timeout = stores.FOREVER
        with _quiet_standard_output():
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", self._client),
                place.process,
                1 + max(place.processes_of),
                options,
            )

    def send(self, tensor: torch.Tensor, process: int, tag: int) -> Any:
        """Starts to send a contiguous CPU tensor; returns a handle with ``wait()``."""
        return self._group.send([as_bytes(tensor)], process, tag)

    def receive(self, tensor: torch.Tensor, process: int, tag: int) -> Any:
        """Starts to fill a contiguous CPU tensor; returns a handle with ``wait()``."""
        return self._group.recv([as_bytes(tensor)], process, tag)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a 1-D uint8 tensor: gloo knows fewer dtypes than torch."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


@contextlib.contextmanager
def _quiet_standard_output() -> Iterator[None]:
    """gloo writes lines to the process's standard output while it connects (torch 2.6 and later).

    That output belongs to the program.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class TransportMaker:
    """Makes the transport of a meeting place at the first need, once per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place: Optional[MeetingPlace] = None
        self._transport: Optional[Transport] = None

    def get(self, place: MeetingPlace) -> Transport:
        with self._lock:
            if self._transport is None or self._place is not place:
                self._transport, self._place = Transport(place), place
            return self._transport


def wait_all(handles: List[Any]) -> None:
    for handle in handles:
        handle.wait()
