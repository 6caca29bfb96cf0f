"""Is a submitted request one that the model can serve?"""

import math

from moebius_proto.worker.v1 import worker_pb2 as pb


def defect(submit: pb.Submit, model: pb.Model) -> str | None:
    """What is wrong with `submit`, for people; None if nothing is."""
    vocab = model.vocab_size
    length = len(submit.token_ids)
    if length == 0:
        return "token_ids is empty"
    if max(submit.token_ids) >= vocab:
        return f"token_ids has id {max(submit.token_ids)}; the vocabulary ends at {vocab - 1}"
    if length >= model.max_model_len:
        return f"{length} tokens leave no room for another: the limit is {model.max_model_len}"
    if submit.resumed >= length:
        return f"resumed is {submit.resumed}: that leaves no prompt of {length} tokens"
    if submit.max_tokens <= submit.resumed:
        return f"max_tokens is {submit.max_tokens}; it must be more than resumed ({submit.resumed})"
    if submit.min_tokens > submit.max_tokens:
        return f"min_tokens ({submit.min_tokens}) is more than max_tokens ({submit.max_tokens})"
    if any(token_id >= vocab for token_id in submit.stop_token_ids):
        return f"stop_token_ids has an id beyond the vocabulary, which ends at {vocab - 1}"
    return _sampling_defect(submit.sampling, vocab)


def _sampling_defect(sampling: pb.Sampling, vocab: int) -> str | None:
    # Each comparison is false for NaN.
    checks = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0 < sampling.repetition_penalty < math.inf,
            "more than 0",
        ),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            math.isfinite(sampling.frequency_penalty),
            "finite",
        ),
        ("logprobs", sampling.logprobs, sampling.logprobs <= vocab, f"at most {vocab}"),
    )
    for name, value, good, rule in checks:
        if not good:
            return f"{name} is {value:g}; it must be {rule}"
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= vocab or not math.isfinite(bias):
            return f"logit_bias of {token_id} is {bias:g}; ids are below {vocab}, values finite"
    return None
