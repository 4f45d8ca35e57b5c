"""Which layout a job gets: from what was asked for and what the machine has."""

from __future__ import annotations

import os
from typing import List, Optional

from pjrt_compat import environ
from pjrt_compat.errors import TopologyError
from pjrt_compat.replicas import runtime
from pjrt_compat.replicas.layouts import Topology, parse_topology

VARIABLE = "PJRT_COMPAT_TOPOLOGY"


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
