"""What the front knows of its worker; kept by the supervisor, read by everybody, answered from memory."""

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field

from moebius_proto.worker.v1 import engine_pb2, worker_pb2

# No reason of the protocol: the engine was ended for one on another fallback level.
LEVEL_CHANGED = "LEVEL_CHANGED"


@dataclass
class WorkerState:
    pid: int
    worker_id: str = field(default_factory=lambda: secrets.token_hex(4))
    # Engine processes that were started, and those after the first by why the one before ended.
    starts: int = 0
    restarts_by: Counter[str] = field(default_factory=Counter)
    # Why the last engine ended: a reason's name, or LEVEL_CHANGED.
    ended_by: str = ""
    phase: worker_pb2.State = worker_pb2.STATE_LOADING
    draining: bool = False
    engine_pid: int = 0
    load: worker_pb2.LoadProgress = field(default_factory=worker_pb2.LoadProgress)
    # Of the engine that is running; empty before its first word.
    stats: engine_pb2.EngineStats = field(default_factory=engine_pb2.EngineStats)
    # Seconds since the engine's last frame.
    silence: float = 0.0
    last_fault: worker_pb2.Fault | None = None
    # Of the engine that was started last, and how many levels there are besides 0.
    fallback_level: int = 0
    fallback_name: str = ""
    fallback_levels: int = 0
    # What the engine last told of its experts.
    experts: engine_pb2.ExpertUse = field(default_factory=engine_pb2.ExpertUse)
    # Of the last engine that was ready, and the tokenizer's files with it.
    model: worker_pb2.Model | None = None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    # Counters of the engines before this one.
    earlier: engine_pb2.EngineStats = field(default_factory=engine_pb2.EngineStats)

    @property
    def state(self) -> worker_pb2.State:
        if self.draining and self.phase == worker_pb2.STATE_READY:
            return worker_pb2.STATE_DRAINING
        return self.phase

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def engine_started(self, pid: int) -> None:
        if self.starts:
            self.restarts_by[self.ended_by] += 1
        self.starts += 1
        self.engine_pid = pid
        self.phase = worker_pb2.STATE_LOADING
        self.load = worker_pb2.LoadProgress()
        self.silence = 0.0

    def engine_ready(
        self, model: worker_pb2.Model, tokenizer_files: dict[str, bytes], stats: engine_pb2.EngineStats
    ) -> None:
        self.phase = worker_pb2.STATE_READY
        self.model = model
        self.tokenizer_files = tokenizer_files
        self.stats = stats

    def engine_ended(self, reason: worker_pb2.Reason, message: str, *, permanent: bool) -> None:
        self.phase = worker_pb2.STATE_FAILED if permanent else worker_pb2.STATE_RESTARTING
        self.engine_pid = 0
        self.ended_by = worker_pb2.Reason.Name(reason).removeprefix("REASON_")
        self.earlier = self.totals()
        self.stats = engine_pb2.EngineStats()
        self.last_fault = worker_pb2.Fault(
            reason=reason, message=message, time_ms=time.time_ns() // 1_000_000
        )

    def engine_replaced(self) -> None:
        """One that was not ready was ended for another, which is started at once: nobody's fault."""
        self.phase = worker_pb2.STATE_RESTARTING
        self.ended_by = LEVEL_CHANGED
        self.engine_pid = 0

    def totals(self) -> engine_pb2.EngineStats:
        """Only the counters: over all engines of this worker."""
        names = ("prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "late_compilations")
        return engine_pb2.EngineStats(
            **{name: getattr(self.earlier, name) + getattr(self.stats, name) for name in names}
        )

    def status(self) -> worker_pb2.Status:
        stats = self.stats
        return worker_pb2.Status(
            incarnation=f"{self.worker_id}-{self.starts}",
            state=self.state,
            load=self.load if self.phase == worker_pb2.STATE_LOADING else None,
            step=stats.step,
            last_progress_ms=round(self.silence * 1000),
            running=stats.running,
            waiting=stats.waiting,
            max_running=stats.max_running,
            kv_pages_used=stats.kv_pages_used,
            kv_pages_cached=stats.kv_pages_cached,
            kv_pages_total=stats.kv_pages_total,
            restarts=self.restarts,
            last_fault=self.last_fault,
            pid=self.pid,
            engine_pid=self.engine_pid,
            fallback_level=self.fallback_level,
            fallback_levels=self.fallback_levels,
            fallback_name=self.fallback_name,
        )
