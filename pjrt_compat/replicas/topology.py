"""Layouts: hosts x processes per host x replicas per process."""

from __future__ import annotations

import os
import re
from typing import List, NamedTuple, Optional

from pjrt_compat import environ
from pjrt_compat.errors import TopologyError
from pjrt_compat.replicas import runtime

VARIABLE = "PJRT_COMPAT_TOPOLOGY"

# Devices that XLA shows per chip, chips per full host, and whether the number in a name such as
# v4-8 counts TensorCores (two per chip) or chips. See cloud.google.com/tpu/docs/system-architecture.
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


def requested_topology() -> Optional[Topology]:
    """What PJRT_COMPAT_TOPOLOGY asks for, if anything."""
    name = os.environ.get(VARIABLE, "").strip()
    return parse_topology(name) if name else None


def plan_job(nprocs: Optional[int]) -> Topology:
    """The layout of an ``xmp.spawn`` with this ``nprocs``; ``nprocs=1`` is one replica anywhere.

    Raises:
      TopologyError: ``nprocs`` is not a number of replicas this host can have; the message lists
        those it can.
      TypeError: ``nprocs`` is no integer.
    """
    if nprocs is not None and (isinstance(nprocs, bool) or not isinstance(nprocs, int)):
        raise TypeError(
            "xmp.spawn: nprocs must be an int or None, not {} ({!r})".format(
                type(nprocs).__name__, nprocs
            )
        )
    if nprocs is not None and nprocs < 1:
        raise TopologyError("xmp.spawn: nprocs must be at least 1, got {}".format(nprocs))
    kind = runtime.device_kind()
    topology = _cpu_topology(nprocs) if kind == "CPU" else _device_topology(kind)
    allowed: List[int] = sorted({1, topology.local_world_size})
    if nprocs is not None and nprocs not in allowed:
        raise TopologyError(
            "xmp.spawn: nprocs={} cannot be had in topology {}: use {} or None. {}".format(
                nprocs,
                topology,
                " or ".join(str(n) for n in allowed),
                "Change or unset {} for another number of replicas.".format(VARIABLE)
                if kind == "CPU"
                else "The runtime drives all devices of a host or one.",
            )
        )
    if nprocs == 1:
        return Topology("one replica", 1, 1, 1)
    if topology.hosts > 1 and kind == "CPU":
        raise TopologyError(
            "topology {} spans several hosts; on CPU one host can be simulated, with at most the "
            "replicas of cpu:PxT".format(topology)
        )
    return topology


def _cpu_topology(nprocs: Optional[int]) -> Topology:
    """On CPU a process per replica, as XRT had, unless a topology was asked for."""
    requested = requested_topology()
    if requested is not None:
        return requested
    replicas = nprocs or environ.requested_replicas(os.environ) or 1
    return Topology("cpu:{}x1".format(replicas), 1, replicas, 1)


def _device_topology(kind: str) -> Topology:
    requested = requested_topology()
    if kind == "TPU":
        processes, devices = runtime.tpu_layout()
        if requested is not None and (requested.processes, requested.replicas_per_process) != (
            processes,
            devices,
        ):
            raise TopologyError(
                "{}={} does not fit this machine: its TPU has {} process(es) of {} device(s). "
                "Unset it, or set PJRT_DEVICE=CPU to simulate.".format(
                    VARIABLE, requested.name, processes, devices
                )
            )
        return Topology("tpu:{}x{}".format(processes, devices), 1, processes, devices)
    if requested is not None:
        raise TopologyError(
            "{}={} can be used with PJRT_DEVICE=CPU or TPU, not with {}".format(
                VARIABLE, requested.name, kind
            )
        )
    processes = environ.requested_replicas(os.environ)
    if not processes:
        raise TopologyError(
            "the number of {0} devices is not known: set GPU_NUM_DEVICES (CUDA) or "
            "NEURON_NUM_DEVICES ({0})".format(kind)
        )
    return Topology("{}:{}x1".format(kind.lower(), processes), 1, processes, 1)
