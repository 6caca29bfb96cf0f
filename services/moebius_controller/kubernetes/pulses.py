"""Asks the workers in pods how they are: all at the same time, each by a task of its own."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from moebius_controller.kubernetes.observe import Answers
from moebius_controller.probe import Probe, Pulse, Rhythm
from moebius_proto.channel import WorkerTls

RHYTHM = Rhythm(interval=1.0, timeout=2.0)
# Questions that are under way at the same time: those to workers that hang take the whole time-out.
AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Patient:
    """One run of a worker: after a restart, what its predecessor said is no answer."""

    uid: str
    restarts: int
    address: str


class Pulses:
    def __init__(self, tls: WorkerTls | None, rhythm: Rhythm = RHYTHM) -> None:
        self._tls = tls
        self._rhythm = rhythm
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._felt: dict[Patient, tuple[Pulse, asyncio.Task[None]]] = {}

    def answers(self, patients: frozenset[Patient]) -> Mapping[str, Answers]:
        """Of these, by uid, from memory; others are not asked any more."""
        for patient in self._felt.keys() - patients:
            _, feeling = self._felt.pop(patient)
            feeling.cancel()
        for patient in patients - self._felt.keys():
            pulse = Pulse(Probe(patient.address, self._tls), self._rhythm, lambda _: True)
            self._felt[patient] = pulse, asyncio.create_task(pulse.feel(self._turns))
        return {
            patient.uid: Answers(pulse.health, pulse.silence) for patient, (pulse, _) in self._felt.items()
        }

    async def stop(self) -> None:
        feeling = [task for _, task in self._felt.values()]
        self._felt.clear()
        for task in feeling:
            task.cancel()
        await asyncio.gather(*feeling, return_exceptions=True)
