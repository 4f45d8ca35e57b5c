"""Layouts: hosts x processes per host x replicas per process."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

from pjrt_compat.errors import TopologyError

# Devices that XLA shows per chip, chips per full host, and whether the number in a name such as
# v4-8 counts TensorCores (two per chip) or chips. See
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.
_GENERATIONS = {
    "v2": (2, 4, True),
    "v3": (2, 4, True),
    "v4": (1, 4, True),
    "v5p": (1, 4, True),
    "v5litepod": (1, 4, False),
    "v5e": (1, 4, False),
    "v6e": (1, 4, False),
}
# One host of these generations may carry eight chips.
_EIGHT_CHIP_HOSTS = ("v5litepod", "v5e", "v6e")


class Topology(NamedTuple):
    """How the replicas of a job are spread."""

    name: str
    hosts: int
    processes: int
    replicas_per_process: int

    @property
    def local_world_size(self) -> int:
        """Replicas on one host."""
        return self.processes * self.replicas_per_process

    @property
    def world_size(self) -> int:
        return self.hosts * self.local_world_size

    def __str__(self) -> str:
        return "{} ({} host(s) x {} process(es) x {} replica(s))".format(
            self.name, self.hosts, self.processes, self.replicas_per_process
        )


def parse_topology(name: str) -> Topology:
    """The layout named ``name``: ``cpu:PxT`` or a TPU type such as ``v3-8``.

    Raises:
      TopologyError: the name is neither.
    """
    text = name.strip().lower()
    match = re.match(r"cpu:(\d+)x(\d+)$", text)
    if match:
        processes, replicas = int(match.group(1)), int(match.group(2))
        if processes and replicas:
            return Topology(text, 1, processes, replicas)
    match = re.match(r"(v\d+[a-z]*)-(\d+)$", text)
    if match and match.group(1) in _GENERATIONS:
        topology = _tpu_topology(text, match.group(1), int(match.group(2)))
        if topology is not None:
            return topology
    raise TopologyError(
        "unknown topology {!r}: use cpu:PxT (P processes with T replica threads each, for example "
        "cpu:4x1) or a TPU type of {} (for example v3-8)".format(
            name, ", ".join(sorted(_GENERATIONS))
        )
    )


def _tpu_topology(text: str, generation: str, number: int) -> Optional[Topology]:
    devices_per_chip, chips_per_host, counts_cores = _GENERATIONS[generation]
    if counts_cores:
        if number % 2:
            return None
        chips = number // 2
    else:
        chips = number
    if generation in _EIGHT_CHIP_HOSTS and chips == 8:
        chips_per_host = 8
    if chips == 0 or (chips > chips_per_host and chips % chips_per_host):
        return None
    hosts = max(1, chips // chips_per_host)
    return Topology(text, hosts, min(chips, chips_per_host), devices_per_chip)
