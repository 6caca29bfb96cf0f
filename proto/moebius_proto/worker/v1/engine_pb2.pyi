from moebius_proto.worker.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrontFrame(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: _worker_pb2.Submit
    cancel: _worker_pb2.Cancel
    def __init__(self, submit: _Optional[_Union[_worker_pb2.Submit, _Mapping]] = ..., cancel: _Optional[_Union[_worker_pb2.Cancel, _Mapping]] = ...) -> None: ...

class EngineFrame(_message.Message):
    __slots__ = ("loading", "ready", "begin", "end", "fatal")
    LOADING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    loading: _worker_pb2.LoadProgress
    ready: EngineReady
    begin: StepBegin
    end: StepEnd
    fatal: EngineFatal
    def __init__(self, loading: _Optional[_Union[_worker_pb2.LoadProgress, _Mapping]] = ..., ready: _Optional[_Union[EngineReady, _Mapping]] = ..., begin: _Optional[_Union[StepBegin, _Mapping]] = ..., end: _Optional[_Union[StepEnd, _Mapping]] = ..., fatal: _Optional[_Union[EngineFatal, _Mapping]] = ...) -> None: ...

class EngineReady(_message.Message):
    __slots__ = ("model", "stats")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    model: _worker_pb2.Model
    stats: EngineStats
    def __init__(self, model: _Optional[_Union[_worker_pb2.Model, _Mapping]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ...) -> None: ...

class StepBegin(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class StepEnd(_message.Message):
    __slots__ = ("deltas", "failures", "stats", "step", "experts")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Delta]
    failures: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Failure]
    stats: EngineStats
    step: ComputedStep
    experts: ExpertUse
    def __init__(self, deltas: _Optional[_Iterable[_Union[_worker_pb2.Delta, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_worker_pb2.Failure, _Mapping]]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ..., step: _Optional[_Union[ComputedStep, _Mapping]] = ..., experts: _Optional[_Union[ExpertUse, _Mapping]] = ...) -> None: ...

class ExpertUse(_message.Message):
    __slots__ = ("imbalance", "idle")
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    imbalance: _containers.RepeatedScalarFieldContainer[float]
    idle: int
    def __init__(self, imbalance: _Optional[_Iterable[float]] = ..., idle: _Optional[int] = ...) -> None: ...

class ComputedStep(_message.Message):
    __slots__ = ("requests", "tokens", "seconds")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    tokens: int
    seconds: float
    def __init__(self, requests: _Optional[int] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("step", "running", "waiting", "max_running", "kv_pages_used", "kv_pages_cached", "kv_pages_total", "prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "late_compilations")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LATE_COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    step: int
    running: int
    waiting: int
    max_running: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages_total: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    late_compilations: int
    def __init__(self, step: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., max_running: _Optional[int] = ..., kv_pages_used: _Optional[int] = ..., kv_pages_cached: _Optional[int] = ..., kv_pages_total: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., late_compilations: _Optional[int] = ...) -> None: ...

class EngineFatal(_message.Message):
    __slots__ = ("reason", "message", "permanent")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PERMANENT_FIELD_NUMBER: _ClassVar[int]
    reason: _worker_pb2.Reason
    message: str
    permanent: bool
    def __init__(self, reason: _Optional[_Union[_worker_pb2.Reason, str]] = ..., message: _Optional[str] = ..., permanent: _Optional[bool] = ...) -> None: ...
