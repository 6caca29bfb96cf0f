"""Between the messages of the protocol and the plain data of the engine."""

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.types import Finish, Logprobs, Output, Request, SamplingParams

_FINISH = {
    None: worker_pb2.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: worker_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
}


def request_from(submit: worker_pb2.Submit, now: float) -> Request:
    """`now`: when it came, on the scheduler's clock; deadlines go over the wire as what is left."""
    sampling = submit.sampling
    return Request(
        handle=submit.handle,
        request_id=submit.request_id,
        token_ids=tuple(submit.token_ids),
        resumed=submit.resumed,
        max_tokens=submit.max_tokens,
        min_tokens=submit.min_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        ),
        quarantined=submit.quarantined,
        priority=submit.priority,
        deadline=now + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        grammar=submit.grammar.text if submit.HasField("grammar") else None,
    )


def delta_from(output: Output, logprobs: Logprobs | None) -> worker_pb2.Delta:
    """`logprobs`: of the output's one token, when the request asked for them."""
    delta = worker_pb2.Delta(
        handle=output.handle,
        token_ids=output.token_ids,
        finish_reason=_FINISH[output.finish],
        cached_tokens=output.cached_tokens,
    )
    if logprobs is not None:
        delta.logprobs.add(
            logprob=logprobs.logprob,
            top_token_ids=[token_id for token_id, _ in logprobs.top],
            top_logprobs=[logprob for _, logprob in logprobs.top],
        )
    return delta


def loading(phase: str, done: int, total: int) -> engine_pb2.EngineFrame:
    """`done` and `total` in bytes."""
    progress = worker_pb2.LoadProgress(phase=phase, bytes_done=done, bytes_total=total)
    return engine_pb2.EngineFrame(loading=progress)


def fatal(reason: worker_pb2.Reason, message: str, *, permanent: bool) -> engine_pb2.EngineFrame:
    return engine_pb2.EngineFrame(
        fatal=engine_pb2.EngineFatal(reason=reason, message=message, permanent=permanent)
    )
