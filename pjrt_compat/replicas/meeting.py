"""What a meeting of replicas is about, and where in the program each replica stands."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import traceback
from types import FrameType
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

RENDEZVOUS = "rendezvous"
COLLECTIVE = "collective"


class Topic(NamedTuple):
    """What a meeting is about.

    Attributes:
      kind: ``rendezvous`` or ``collective``.
      name: the tag, or the number of the collective.
      participants: ordinals, ascending.
      description: what all must agree on; shown in errors.
      round: how often these participants have met under this name before.
    """

    kind: str
    name: str
    participants: Tuple[int, ...]
    description: str
    round: int = 0

    def clashes_with(self, other: Topic) -> bool:
        """Whether replicas at these two topics mean the same meeting but will never meet."""
        return (self.kind, self.name) == (other.kind, other.name) and (
            self.participants != other.participants or self.description != other.description
        )

    def store_key(self) -> str:
        """Names the meeting in the store, alike in every process."""
        text = repr(tuple(self)).encode("utf-8", "backslashreplace")
        return "meet/" + hashlib.sha256(text).hexdigest()[:32]

    def failure_key(self) -> str:
        """Where a failure of the meeting is told. A collective's number names it for all."""
        if self.kind == COLLECTIVE:
            return "failed/" + self.name
        return "failed/" + self.store_key()

    def __str__(self) -> str:
        if self.kind == RENDEZVOUS:
            return "rendezvous({!r}) of replicas {}".format(self.name, list(self.participants))
        return self.description


class Meeting:
    """Replicas of this process gathered around one topic."""

    def __init__(self, topic: Topic, expected: int, lock: threading.Lock) -> None:
        self.topic = topic
        self.expected = expected
        self.payloads: Dict[int, Any] = {}
        self.threads: Dict[int, int] = {}
        self.changed = threading.Condition(lock)
        self.done = False
        self.result: Any = None
        self.error: Optional[BaseException] = None


def user_place(frame: Optional[FrameType]) -> str:
    """``file:line`` of the innermost frame that is neither ours nor torch's nor Python's own."""
    stack = traceback.extract_stack(frame)
    ours = _library_directories()
    for summary in reversed(stack):
        if not summary.filename.startswith(ours):
            return "{}:{} in {}".format(summary.filename, summary.lineno, summary.name)
    last = stack[-1]
    return "{}:{} in {}".format(last.filename, last.lineno, last.name)


def _library_directories() -> Tuple[str, ...]:
    modules = [sys.modules.get(name) for name in ("pjrt_compat", "torch", "torch_xla", "threading")]
    files = [getattr(module, "__file__", None) for module in modules]
    directories = [os.path.dirname(os.path.abspath(file)) + os.sep for file in files if file]
    # Installed packages live below the standard library's directory, and they are users' code.
    standard = directories.pop()
    files = [os.path.join(standard, name) for name in os.listdir(standard) if name.endswith(".py")]
    packages = [os.path.join(standard, name) for name in ("multiprocessing", "concurrent")]
    return tuple(directories + files + packages + ["<"])


def thread_place(thread: Optional[int]) -> str:
    """``user_place`` of a running thread."""
    frame = sys._current_frames().get(thread or -1)
    return user_place(frame) if frame is not None else "a finished thread"


def waiting_line(ordinal: int, topic: Topic, thread: Optional[int]) -> str:
    return "replica {} is in {} at {}".format(ordinal, topic, thread_place(thread))


def mismatch_text(topic: Topic, lines: Sequence[str]) -> str:
    if topic.kind == RENDEZVOUS:
        head = "replicas met rendezvous {!r} with different `replicas`".format(topic.name)
    else:
        head = "replicas made different calls as their collective number {}".format(topic.name)
    return "{}: {}. Every participant must make the same call.".format(head, "; ".join(lines))
