"""Translation between the gateway's plain data and the messages of worker.proto."""

from collections.abc import Sequence

from moebius_gateway.journal import Failure, Submission
from moebius_gateway.types import FinishReason, ModelInfo, Reason, TokenLogprobs, Tokens
from moebius_gateway.workers.view import WorkerState
from moebius_proto.worker.v1 import worker_pb2 as pb

_FINISH: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_REASONS: dict[int, Reason] = {pb.Reason.Value(f"REASON_{reason}"): reason for reason in Reason}
_STATES: dict[int, WorkerState] = {
    pb.State.Value(f"STATE_{state}"): state for state in WorkerState if state != WorkerState.UNREACHABLE
}


def hello_frame(gateway_id: str) -> pb.GatewayFrame:
    return pb.GatewayFrame(hello=pb.Hello(gateway_id=gateway_id))


def cancel_frame(handle: int) -> pb.GatewayFrame:
    return pb.GatewayFrame(cancel=pb.Cancel(handle=handle))


def submit_frame(submission: Submission) -> pb.GatewayFrame:
    sampling = submission.sampling
    return pb.GatewayFrame(
        submit=pb.Submit(
            handle=submission.handle,
            request_id=submission.request_id,
            token_ids=submission.token_ids,
            resumed=submission.resumed,
            sampling=pb.Sampling(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                seed=sampling.seed,
                logit_bias=dict(sampling.logit_bias),
                logprobs=sampling.logprobs,
            ),
            max_tokens=submission.max_tokens,
            min_tokens=submission.min_tokens,
            stop_token_ids=submission.stop_token_ids,
            quarantined=submission.quarantined,
            grammar=None if submission.grammar is None else pb.Grammar(text=submission.grammar),
            priority=submission.priority,
            deadline_ms=submission.deadline_ms,
        )
    )


def tokens(delta: pb.Delta) -> Tokens:
    """A finish reason that this gateway does not know (a newer worker's) counts as a stop."""
    return Tokens(
        token_ids=tuple(delta.token_ids),
        logprobs=tuple(map(_logprobs, delta.logprobs)),
        finish_reason=_FINISH.get(delta.finish_reason, FinishReason.STOP) if delta.finish_reason else None,
        cached_tokens=delta.cached_tokens,
    )


def _logprobs(one: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(one.top_token_ids, one.top_logprobs, strict=True))
    return TokenLogprobs(one.logprob, top)


def merged(pieces: Sequence[Tokens]) -> Tokens:
    """Consecutive tokens of one generation as one piece."""
    if len(pieces) == 1:
        return pieces[0]
    return Tokens(
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(one for piece in pieces for one in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
        cached_tokens=pieces[0].cached_tokens,
    )


def failure(error: pb.Error, worker: str, incarnation: str) -> Failure:
    """A reason that this gateway does not know (a newer worker's) counts as a death of the engine."""
    return Failure(
        worker=worker,
        incarnation=incarnation,
        reason=_REASONS.get(error.reason, Reason.ENGINE_DEAD),
        message=error.message,
        retry_after=error.retry_after_ms / 1000,
        in_step=error.in_step,
        tokens_sent=error.tokens_sent,
    )


def model_info(model: pb.Model, created: int) -> ModelInfo:
    return ModelInfo(
        id=model.id,
        architecture=model.architecture,
        tokenizer_hash=model.tokenizer_hash,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        created=created,
    )


def state(status: pb.Status) -> WorkerState:
    """A state that this gateway does not know counts as not ready yet."""
    return _STATES.get(status.state, WorkerState.LOADING)


def detail(status: pb.Status) -> str:
    """What a person wants to know about a worker that is not ready."""
    parts = []
    if status.state == pb.STATE_LOADING and status.load.phase:
        done, total = status.load.bytes_done, status.load.bytes_total
        parts.append(status.load.phase + (f" ({done * 100 // total} %)" if total else ""))
    if status.last_fault.message:
        parts.append(f"last fault: {status.last_fault.message}")
    return "; ".join(parts)
