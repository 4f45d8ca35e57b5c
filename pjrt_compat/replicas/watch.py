"""Why does this replica wait: mismatches, replicas that have ended, and long waits.

Replicas whose topics differ would wait for each other for ever. Whoever waits longer than a moment
therefore publishes what it waits for, reads what the others wait for, and raises when the two can
never fit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from typing import (
    TYPE_CHECKING,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    Type,
)

from pjrt_compat.errors import PjrtCompatError, ReplicaLostError, ReplicaMismatchError
from pjrt_compat.replicas import store as stores
from pjrt_compat.replicas.meeting import (
    Meeting,
    Topic,
    mismatch_text,
    thread_place,
    waiting_line,
)

if TYPE_CHECKING:
    from pjrt_compat.replicas.rendezvous import MeetingPlace

TIMEOUT_VARIABLE = "PJRT_COMPAT_TIMEOUT"
# A replica that waits this long begins to look for a reason.
GRACE_SECONDS = 0.5
# A replica that waits this long says so.
WATCHDOG_SECONDS = 60.0

_log = logging.getLogger("pjrt_compat")


class Patience:
    """A replica that waits, and from time to time asks itself why."""

    def __init__(self, place: MeetingPlace, meeting: Meeting, ordinal: int, started: float) -> None:
        self.place = place
        self.meeting = meeting
        self.ordinal = ordinal
        self.started = started
        self.published = False
        self.spoken = False

    def look_for_a_reason(self) -> None:
        """Raises when waiting is in vain; speaks once when it is long.

        Raises:
          ReplicaMismatchError: another replica waits at a call that can never fit this one.
          ReplicaLostError: a participant's function has returned, or PJRT_COMPAT_TIMEOUT passed.
        """
        topic = self.meeting.topic
        if not self.published:
            self.published = True
            self.place.publish(dict.fromkeys(self.meeting.payloads, topic))
        # A replica that saw a mismatch first may have gone on since; it has left word.
        failure = self.place.read_failure(topic)
        if failure is not None:
            raise ReplicaMismatchError(failure)
        missing: List[int] = []
        clashing: List[Topic] = []
        lines: List[str] = []
        where: Dict[int, str] = {}
        for ordinal in topic.participants:
            if ordinal in self.meeting.payloads:
                continue
            waiting = self._waiting_of(ordinal)
            if waiting is None:
                missing.append(ordinal)
            elif waiting[0] != topic:
                missing.append(ordinal)
                where[ordinal] = "waits in {} at {}".format(*waiting)
                if topic.clashes_with(waiting[0]):
                    lines.append("replica {} is in {} at {}".format(ordinal, *waiting))
                    clashing.append(waiting[0])
        if lines:
            own = waiting_line(self.ordinal, topic, self.meeting.threads.get(self.ordinal))
            text = mismatch_text(topic, [own, *lines])
            self.place.tell_failure([topic, *clashing], text)
            raise ReplicaMismatchError(text)
        self._check_ended(topic, missing)
        self._check_time(topic, missing, where)

    def _waiting_of(self, ordinal: int) -> Optional[Tuple[Topic, str]]:
        for other in self.place.open_meetings():
            if ordinal in other.payloads:
                return other.topic, thread_place(other.threads.get(ordinal))
        return self.place.read_waiting(ordinal)

    def _check_ended(self, topic: Topic, missing: Sequence[int]) -> None:
        ended = [ordinal for ordinal in missing if self.place.has_ended(ordinal)]
        if ended:
            raise ReplicaLostError(
                "replica {} waits in {}, but the function of replica(s) {} has returned without "
                "joining. All participants must make the same calls; look for a condition around "
                "this one.".format(self.ordinal, topic, ended)
            )

    def _check_time(self, topic: Topic, missing: Sequence[int], where: Dict[int, str]) -> None:
        waited = time.monotonic() - self.started
        if self.place.timeout is not None and waited > self.place.timeout:
            raise ReplicaLostError(
                "replica {} waited {:.0f} s ({}) in {}; still missing: {}".format(
                    self.ordinal, waited, TIMEOUT_VARIABLE, topic, self._whereabouts(missing, where)
                )
            )
        if waited > WATCHDOG_SECONDS and not self.spoken:
            self.spoken = True
            if self.place.claim(topic):
                print(
                    "pjrt_compat: {} has been waited for {:.0f} s; still missing: {}. "
                    "Set {}=<seconds> to make this an error.".format(
                        topic, waited, self._whereabouts(missing, where), TIMEOUT_VARIABLE
                    ),
                    file=sys.stderr,
                    flush=True,
                )

    def _whereabouts(self, missing: Sequence[int], where: Dict[int, str]) -> str:
        asked = [o for o in missing if o not in where and o not in self.place.replicas]
        answers = ask_where(self.place, asked) if asked else {}
        parts = []
        for ordinal in missing:
            if ordinal in where:
                place = where[ordinal]
            elif ordinal in self.place.replicas:
                place = "is at " + thread_place(self.place.threads.get(ordinal))
            else:
                place = answers.get(ordinal, "does not answer")
            parts.append("replica {} ({})".format(ordinal, place))
        return ", ".join(parts)


class Watcher:
    """Looks for reasons on behalf of threads that wait inside the store.

    A wait in the store cannot be interrupted, so what the watcher finds is written where the
    waiting thread, and those of other processes at the same meeting, will read it: at the gate.
    """

    def __init__(self, place: MeetingPlace) -> None:
        self._place = place
        self._waits: Dict[str, Patience] = {}
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._thread: Optional[threading.Thread] = None

    @contextlib.contextmanager
    def watching(self, gate: str, patience: Patience) -> Iterator[None]:
        """While the body waits for ``gate``, the watcher thinks for ``patience``."""
        with self._lock:
            self._waits[gate] = patience
            self._work.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pjrt_compat-watcher", daemon=True
                )
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[gate]
                if not self._waits:
                    self._work.clear()

    def _run(self) -> None:
        while True:
            self._work.wait()
            time.sleep(GRACE_SECONDS)
            with self._lock:
                waits = list(self._waits.values())
            for patience in waits:
                if time.monotonic() - patience.started < GRACE_SECONDS:
                    continue
                try:
                    patience.look_for_a_reason()
                except PjrtCompatError as error:
                    self._place.close_gate(patience.meeting.topic, error)
                except RuntimeError as error:  # the store is gone, and so will be this process
                    _log.debug("the store of the job is gone: %s", error)
                    return


def encode_error(error: PjrtCompatError) -> bytes:
    return b"!" + json.dumps([type(error).__name__, str(error)]).encode()


def raise_if_error(value: bytes) -> None:
    """Raises what a watcher has written at a gate."""
    if value.startswith(b"!"):
        name, text = json.loads(value[1:])
        kinds: Dict[str, Type[PjrtCompatError]] = {
            "ReplicaMismatchError": ReplicaMismatchError,
            "ReplicaLostError": ReplicaLostError,
        }
        raise kinds.get(name, PjrtCompatError)(text)


def ask_where(place: MeetingPlace, ordinals: Sequence[int], seconds: float = 2.0) -> Dict[int, str]:
    """The line of code each of these replicas of other processes is at, as far as they answer."""
    assert place.clients is not None
    answers = {}
    with place.clients.borrow() as client:
        number = client.add("where/asked", 1)
        client.set("where/{}".format(number), b"")
        deadline = time.monotonic() + seconds
        for ordinal in ordinals:
            key = "at/{}/{}".format(number, ordinal)
            if stores.poll_for(client, key, deadline - time.monotonic()):
                answers[ordinal] = "is at " + client.get(key).decode()
    return answers


def answer_where(place: MeetingPlace, on_lost: Callable[[], None]) -> None:
    """Answers ``ask_where`` for ever; runs on a thread that sleeps inside the store.

    Calls ``on_lost`` when the launcher, which holds the store, is gone.
    """
    assert place.clients is not None
    number = 1
    try:
        client = place.clients.connect()
        while True:
            client.wait(["where/{}".format(number)])
            for ordinal in place.replicas:
                at = thread_place(place.threads.get(ordinal))
                client.set("at/{}/{}".format(number, ordinal), at.encode())
            number += 1
    except RuntimeError as error:  # the connection broke
        _log.debug("the store of the job is gone: %s", error)
        on_lost()


def time_limit() -> Optional[float]:
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise PjrtCompatError(
            "{}={!r} is not a number of seconds".format(TIMEOUT_VARIABLE, text)
        ) from None
