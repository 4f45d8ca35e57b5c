"""What a meeting of replicas is about, and where in the program each replica stands."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import sys
import tempfile
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

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

    @property
    def key(self) -> Tuple[str, str, Tuple[int, ...]]:
        """What replicas of one process gather under, whatever their descriptions."""
        return self.kind, self.name, self.participants

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


def thread_place(thread: Optional[int]) -> str:
    """``file:line`` of a thread's innermost frame that is neither ours nor torch's nor Python's.

    The stack is written by ``faulthandler`` in one piece. Following the frames of a thread that
    runs meanwhile, as ``sys._current_frames`` invites to, crashes Python 3.11.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    frames = _frames_of(text, thread or -1)
    ours = _library_directories()
    for path, place in frames:
        if not path.startswith(ours):
            return place
    return frames[0][1] if frames else "a finished thread"


def _frames_of(text: str, thread: int) -> List[Tuple[str, str]]:
    """Path and shown place of each frame of a thread, innermost first, from faulthandler's text."""
    frames: List[Tuple[str, str]] = []
    inside = False
    for line in text.splitlines():
        head = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line)
        frame = re.match(r'  File "(.*)", line (\d+) in (.*)$', line)
        if head:
            inside = int(head.group(1), 16) == thread
        elif frame and inside:
            frames.append((frame.group(1), "{}:{} in {}".format(*frame.groups())))
    return frames


def _library_directories() -> Tuple[str, ...]:
    modules = [sys.modules.get(name) for name in ("pjrt_compat", "torch", "torch_xla", "threading")]
    files = [getattr(module, "__file__", None) for module in modules]
    directories = [os.path.dirname(os.path.abspath(file)) + os.sep for file in files if file]
    # Installed packages live below the standard library's directory, and they are users' code.
    standard = directories.pop()
    files = [os.path.join(standard, name) for name in os.listdir(standard) if name.endswith(".py")]
    packages = [os.path.join(standard, name) for name in ("multiprocessing", "concurrent")]
    return tuple(directories + files + packages + ["<"])


def waiting_line(ordinal: int, topic: Topic, thread: Optional[int]) -> str:
    return "replica {} is in {} at {}".format(ordinal, topic, thread_place(thread))


def mismatch_text(topic: Topic, lines: Sequence[str]) -> str:
    if topic.kind == RENDEZVOUS:
        head = "replicas met rendezvous {!r} with different `replicas`".format(topic.name)
    else:
        head = "replicas made different calls as their collective number {}".format(topic.name)
    return "{}: {}. Every participant must make the same call.".format(head, "; ".join(lines))
