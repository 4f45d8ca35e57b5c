"""Exceptions, the warning category, and the one way to speak to the user."""

from __future__ import annotations

import os
import sys
import warnings

from pjrt_compat.state import STATE

_SAID_VARIABLE = "_PJRT_COMPAT_SAID"
# Packages whose frames lie between the user's line and a warning.
_BETWEEN = ("pjrt_compat", "wrapt", "importlib", "torch_xla")


class PjrtCompatError(RuntimeError):
    """Base class of what pjrt_compat itself raises."""


class PatchTargetError(PjrtCompatError, AttributeError):
    """A patch could not be applied, and ``strict`` was asked for."""


class TopologyError(PjrtCompatError, ValueError):
    """The topology or the number of replicas asked for cannot be had."""


class ReplicaMismatchError(PjrtCompatError, ValueError):
    """Replicas met at the same call with arguments that do not fit together.

    Attributes:
      topics: the meetings that have failed because of it.
    """

    topics: tuple = ()


class ReplicaLostError(PjrtCompatError):
    """A replica that others wait for has ended, or the time limit for it has passed."""


class PjrtCompatWarning(RuntimeWarning):
    """Something the user should act upon."""


def warn_once(topic: str, message: str) -> None:
    """Warns once per job: in the first process that meets ``topic``, and only there.

    The warning points at the line of the program that led here.

    The topics already spoken about travel to child processes in the environment. A warning
    that filters turned into an error is written to stderr instead: ``python -W error`` asks for
    strictness from the program, and an exception here would make ``import torch_xla`` fail.
    """
    said = os.environ.get(_SAID_VARIABLE, "").split(",")
    if topic in STATE.said or topic in said:
        return
    STATE.said.add(topic)
    os.environ[_SAID_VARIABLE] = ",".join([name for name in said if name] + [topic])
    frame = sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    try:
        warnings.warn_explicit(message, PjrtCompatWarning, frame.f_code.co_filename, frame.f_lineno)
    except PjrtCompatWarning:
        print("PjrtCompatWarning: " + message, file=sys.stderr)
