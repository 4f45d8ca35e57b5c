"""Meetings of replicas on the host: barriers that carry payloads.

Replicas of one process meet through a condition variable. The last of them to arrive speaks for the
process and meets the other processes through the store, so store traffic grows with processes.
Nothing here touches a device.

A meeting is known by its kind (``rendezvous`` or ``collective``), its name (the tag, or the number
of the collective), its participants and its description; replicas at different ones never meet.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from pjrt_compat.errors import PjrtCompatError, ReplicaLostError, ReplicaMismatchError
from pjrt_compat.replicas import store as stores
from pjrt_compat.replicas.identity import Replica
from pjrt_compat.replicas.meeting import (
    COLLECTIVE,
    RENDEZVOUS,
    Meeting,
    Topic,
    mismatch_text,
    thread_place,
    waiting_line,
)
from pjrt_compat.replicas.store import StoreAddress, StoreClients
from pjrt_compat.replicas.watch import (
    GRACE_SECONDS,
    Patience,
    Watcher,
    encode_error,
    raise_if_error,
    time_limit,
)

# Payloads up to this size travel in one append; longer ones in pieces of their own.
_INLINE = 16 << 10
# The counter of a meeting holds the processes that have come (and left), those that brought
# payloads, and whether somebody has declared it failed.
_CARRIED = 1 << 32
_FAILED = 1 << 48


class Frame(NamedTuple):
    """A payload as it travels: whole, or the number of pieces it was stored in."""

    ordinal: int
    pieces: int
    payload: bytes


def parse_frames(data: bytes) -> List[Frame]:
    frames = []
    position = 0
    while position < len(data):
        end = data.index(b"\n", position)
        ordinal, pieces, length = (int(field) for field in data[position:end].split())
        position = end + 1 + length
        frames.append(Frame(ordinal, pieces, data[end + 1 : position]))
    return frames


class MeetingPlace:
    """Where the replicas hosted by this process meet.

    Args:
      replicas: the replicas of this process.
      processes_of: for each ordinal, the number of its process.
      address: the job's store, or None when this process holds the whole job.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        processes_of: Sequence[int],
        address: Optional[StoreAddress],
    ) -> None:
        self.replicas = {replica.ordinal: replica for replica in replicas}
        self.processes_of = list(processes_of)
        self.process = self.processes_of[replicas[0].ordinal]
        # Asked for every message of a collective.
        self._index_in_process = [
            self.processes_of[:ordinal].count(process)
            for ordinal, process in enumerate(self.processes_of)
        ]
        self.clients = StoreClients(address) if address is not None else None
        self.threads: Dict[int, int] = {}
        self.ended: Set[int] = set()
        self._lock = threading.Lock()
        self._open: Dict[Tuple[str, str, Tuple[int, ...]], Meeting] = {}
        self._rounds: Dict[Tuple[int, str, Tuple[int, ...]], int] = {}
        self.watcher = Watcher(self)
        self._published: Set[int] = set()
        self._collectives: Dict[int, int] = {}
        self.timeout = time_limit()

    @property
    def world_size(self) -> int:
        return len(self.processes_of)

    def index_in_process(self, ordinal: int) -> int:
        """Position of a replica among those of its process."""
        return self._index_in_process[ordinal]

    @classmethod
    def of_process(cls, replicas: Sequence[Replica], address: StoreAddress) -> MeetingPlace:
        """The meeting place of this process; learns from the store who is where."""
        first = replicas[0]
        clients = StoreClients(address)
        with clients.borrow() as client:
            own = json.dumps([replica.ordinal for replica in replicas])
            client.set("hosted/{}".format(first.process), own.encode())
            processes_of = [0] * first.world_size
            for process in range(first.processes):
                for ordinal in json.loads(client.get("hosted/{}".format(process))):
                    processes_of[ordinal] = process
        return cls(replicas, processes_of, address)

    # -- what callers use ---------------------------------------------------------------------

    def rendezvous(
        self, ordinal: int, tag: str, payload: bytes, participants: Tuple[int, ...]
    ) -> Dict[int, bytes]:
        """Waits for all participants to reach ``tag``; returns their payloads by ordinal."""
        key = (ordinal, tag, participants)
        with self._lock:
            number = self._rounds.get(key, 0)
            self._rounds[key] = number + 1
        topic = Topic(RENDEZVOUS, tag, participants, "", number)

        def speak(meeting: Meeting) -> Dict[int, bytes]:
            return self._exchange_payloads(topic, meeting.payloads)

        return dict(self._meet(ordinal, topic, payload, speak))

    def next_collective(self, ordinal: int) -> int:
        """Number of the next collective of this replica, which all replicas count alike."""
        with self._lock:
            number = self._collectives.get(ordinal, 0)
            self._collectives[ordinal] = number + 1
        return number

    def agree(
        self,
        ordinal: int,
        name: str,
        description: str,
        payload: Any,
        participants: Optional[Tuple[int, ...]] = None,
    ) -> Dict[int, Any]:
        """All replicas of the job, or these, confirm that they are at the same collective.

        Returns the payloads of the replicas of this process, shared by reference.
        """
        if participants is None:
            participants = tuple(range(self.world_size))
        topic = Topic(COLLECTIVE, name, participants, description)

        def speak(meeting: Meeting) -> Dict[int, Any]:
            if self._is_remote(topic):
                assert self.clients is not None
                with self.clients.borrow() as client:
                    self._gather_processes(client, topic, meeting)
            return meeting.payloads

        return dict(self._meet(ordinal, topic, payload, speak))

    def share(
        self, ordinal: int, name: str, participants: Tuple[int, ...], payload: Any
    ) -> Dict[int, Any]:
        """Payloads of those participants that live in this process, shared by reference."""
        topic = Topic(COLLECTIVE, name, participants, "a later phase of a collective")
        if self._expected(topic) == 1:
            return {ordinal: payload}
        return dict(self._meet(ordinal, topic, payload, lambda meeting: meeting.payloads))

    def leave(self, ordinal: int) -> None:
        """Records that the replica's function has returned."""
        with self._lock:
            self.ended.add(ordinal)
            for meeting in self._open.values():
                meeting.changed.notify_all()
        if self.clients is not None:
            with self.clients.borrow() as client:
                client.set("ended/{}".format(ordinal), b"")

    # -- within the process -------------------------------------------------------------------

    def _expected(self, topic: Topic) -> int:
        return sum(1 for ordinal in topic.participants if ordinal in self.replicas)

    def _is_remote(self, topic: Topic) -> bool:
        return any(ordinal not in self.replicas for ordinal in topic.participants)

    def _meet(
        self, ordinal: int, topic: Topic, payload: Any, speak: Callable[[Meeting], Any]
    ) -> Any:
        if ordinal in self._published:
            self._withdraw(ordinal)
        with self._lock:
            meeting = self._open.get(topic.key)
            if meeting is None:
                meeting = Meeting(topic, self._expected(topic), self._lock)
                self._open[topic.key] = meeting
            meeting.payloads[ordinal] = payload
            meeting.threads[ordinal] = threading.get_ident()
            mismatch = self._local_mismatch(ordinal, topic, meeting)
            last = len(meeting.payloads) == meeting.expected
            if last and mismatch is None:
                del self._open[topic.key]
        if mismatch is not None:
            self.tell_failure([topic, meeting.topic, *mismatch.topics], str(mismatch))
            raise mismatch
        if not last:
            return self._wait_for_speaker(ordinal, meeting)
        try:
            result = speak(meeting)
        except BaseException as error:
            self._finish(meeting, None, error)
            raise
        self._finish(meeting, result, None)
        return result

    def _finish(self, meeting: Meeting, result: Any, error: Optional[BaseException]) -> None:
        if meeting.expected == 1:
            return
        with self._lock:
            meeting.result, meeting.error, meeting.done = result, error, True
            meeting.changed.notify_all()

    def _local_mismatch(
        self, ordinal: int, topic: Topic, meeting: Meeting
    ) -> Optional[ReplicaMismatchError]:
        """The error of replicas of this process that can never meet, given to the waiting ones.

        The caller holds the lock, publishes and raises.
        """
        clashing = [other for other in self._open.values() if topic.clashes_with(other.topic)]
        if not clashing:
            return None
        lines = [waiting_line(ordinal, topic, threading.get_ident())]
        for other in clashing:
            for waiting, thread in other.threads.items():
                if waiting != ordinal:
                    lines.append(waiting_line(waiting, other.topic, thread))
        error = ReplicaMismatchError(mismatch_text(topic, lines))
        error.topics = tuple(other.topic for other in clashing)
        for other in [*clashing, meeting]:
            other.error, other.done = error, True
            other.changed.notify_all()
            self._open.pop(other.topic.key, None)
        return error

    def _wait_for_speaker(self, ordinal: int, meeting: Meeting) -> Any:
        started = time.monotonic()
        patience = Patience(self, meeting, ordinal, started)
        while True:
            with self._lock:
                if not meeting.done:
                    meeting.changed.wait(GRACE_SECONDS)
                if meeting.done:
                    break
                arrived = len(meeting.payloads) == meeting.expected
            if not arrived:
                try:
                    patience.look_for_a_reason()
                except BaseException as error:
                    self._finish(meeting, None, error)
                    with self._lock:
                        self._open.pop(meeting.topic.key, None)
                    raise
        if meeting.error is not None:
            raise _copy_for_this_thread(meeting.error)
        return meeting.result

    # -- between processes --------------------------------------------------------------------

    def _exchange_payloads(self, topic: Topic, payloads: Dict[int, bytes]) -> Dict[int, bytes]:
        if not self._is_remote(topic):
            return payloads
        assert self.clients is not None
        meeting = Meeting(topic, 0, self._lock)
        meeting.payloads = payloads
        with self.clients.borrow() as client:
            key = topic.store_key()
            carried = self._send_payloads(client, key, payloads)
            total = self._gather_processes(client, topic, meeting, carried)
            if total == 0:
                return {ordinal: payloads.get(ordinal, b"") for ordinal in topic.participants}
            frames = parse_frames(client.get(key + "/frames"))
            received = self._receive_payloads(client, key, topic, frames)
            received.update(payloads)
            self._clean_up(client, key, topic, frames)
            return received

    def _send_payloads(self, client: Any, key: str, payloads: Dict[int, bytes]) -> int:
        """Appends a frame per payload; returns 1 when this process brings any, otherwise 0."""
        frames = b""
        for ordinal, payload in payloads.items():
            if not payload:
                continue
            pieces = 0
            if len(payload) > _INLINE:
                pieces = stores.put_long(client, "{}/{}".format(key, ordinal), payload)
                payload = b""
            frames += b"%d %d %d\n" % (ordinal, pieces, len(payload)) + payload
        if frames:
            client.append(key + "/frames", frames)
        return 1 if frames else 0

    def _receive_payloads(
        self, client: Any, key: str, topic: Topic, frames: Sequence[Frame]
    ) -> Dict[int, bytes]:
        received = dict.fromkeys(topic.participants, b"")
        for frame in frames:
            if not frame.pieces:
                received[frame.ordinal] = frame.payload
            elif frame.ordinal not in self.replicas:
                long_key = "{}/{}".format(key, frame.ordinal)
                received[frame.ordinal] = stores.get_long(client, long_key, frame.pieces)
        return received

    def _clean_up(self, client: Any, key: str, topic: Topic, frames: Sequence[Frame]) -> None:
        """Removes the payloads when every process has read them."""
        if client.add(key + "/read", 1) < len(self._processes(topic)):
            return
        for frame in frames:
            stores.delete_long(client, "{}/{}".format(key, frame.ordinal), frame.pieces)
        client.delete_key(key + "/frames")
        client.delete_key(key + "/read")

    def _processes(self, topic: Topic) -> Set[int]:
        return {self.processes_of[ordinal] for ordinal in topic.participants}

    def _gather_processes(
        self, client: Any, topic: Topic, meeting: Meeting, carried: int = 0
    ) -> int:
        """Waits for every process of the topic; returns how many carried a payload.

        A counter tells who is last. The last one opens the gate, and the last to pass removes both
        keys. A meeting that has failed stays so, also for those who come later.
        """
        key = topic.store_key()
        gate = key + "/gate"
        count = len(self._processes(topic))
        arrived = client.add(key, 1 + carried * _CARRIED)
        if arrived < _FAILED and arrived % _CARRIED == count:
            value = b"%d" % (arrived // _CARRIED)
            client.set(gate, value)
        else:
            patience = Patience(self, meeting, min(meeting.payloads), time.monotonic())
            with self.watcher.watching(gate, patience):
                value = client.get(gate)
        raise_if_error(value)
        total = int(value)
        if client.add(key, 1) % _CARRIED == 2 * count:
            client.delete_key(gate)
            client.delete_key(key)
        return total

    # -- looking for a reason -----------------------------------------------------------------

    def open_meetings(self) -> List[Meeting]:
        """Meetings that replicas of this process wait in, for each other or for other processes."""
        with self._lock:
            return list(self._open.values())

    def publish(self, topics: Dict[int, Topic]) -> None:
        """Tells other processes what replicas of this one wait for."""
        if self.clients is None:
            return
        with self.clients.borrow() as client:
            for ordinal, topic in topics.items():
                place = thread_place(self.threads.get(ordinal))
                client.set("waiting/{}".format(ordinal), json.dumps([list(topic), place]).encode())
        self._published.update(topics)

    def _withdraw(self, ordinal: int) -> None:
        self._published.discard(ordinal)
        if self.clients is not None:
            with self.clients.borrow() as client:
                # Emptied, not deleted: a reader that has seen the key would wait for it for ever.
                client.set("waiting/{}".format(ordinal), b"")

    def tell_failure(self, topics: Sequence[Topic], text: str) -> None:
        """Tells everybody who is at one of these meetings, or comes later, that it has failed."""
        if self.clients is None:
            return
        with self.clients.borrow() as client:
            for topic in topics:
                client.set(topic.failure_key(), text.encode())

    def read_failure(self, topic: Topic) -> Optional[str]:
        """What another replica has found out about this meeting."""
        if self.clients is None:
            return None
        with self.clients.borrow() as client:
            text = stores.look_up(client, topic.failure_key())
        return None if text is None else text.decode()

    def close_gate(self, topic: Topic, error: PjrtCompatError) -> None:
        """Lets everybody at a gate through, with an error, unless the last has come by now."""
        assert self.clients is not None
        with self.clients.borrow() as client:
            arrived = client.add(topic.store_key(), _FAILED)
            if arrived // _FAILED == 1 and arrived % _CARRIED < len(self._processes(topic)):
                client.set(topic.store_key() + "/gate", encode_error(error))

    def read_waiting(self, ordinal: int) -> Optional[Tuple[Topic, str]]:
        """What a replica waits for and where, if it published that."""
        key = "waiting/{}".format(ordinal)
        if self.clients is None:
            return None
        with self.clients.borrow() as client:
            text = stores.look_up(client, key)
        if not text:
            return None
        (kind, name, participants, description, number), place = json.loads(text)
        return Topic(kind, name, tuple(participants), description, number), place

    def has_ended(self, ordinal: int) -> bool:
        if ordinal in self.ended:
            return True
        if self.clients is None or ordinal in self.replicas:
            return False
        with self.clients.borrow() as client:
            return stores.look_up(client, "ended/{}".format(ordinal)) is not None

    def claim(self, topic: Topic) -> bool:
        """Whether this process is the one to speak about a long wait."""
        if self.clients is None:
            return True
        with self.clients.borrow() as client:
            return bool(client.add("said/" + topic.store_key(), 1) == 1)


def _copy_for_this_thread(error: BaseException) -> BaseException:
    """One exception object must not be raised on two threads: they would share its traceback."""
    if isinstance(error, PjrtCompatError):
        return type(error)(*error.args)
    return ReplicaLostError(
        "another replica of this process failed while meeting: {!r}".format(error)
    )
