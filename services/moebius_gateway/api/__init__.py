"""HTTP dialects: translation between a client's request and a `Generation`, and back.

What clients can rely on:

- A parameter is honoured or refused with 400 and its name in `param`; `null` is the same as leaving it out.
  Values that change nothing are accepted for parameters that are not supported (parameters.py,
  *_request.py). `user`, `safety_identifier` and `metadata` are labels on which nothing depends.
- `max_tokens` (in chat also `max_completion_tokens`) is a limit: by default, and at most, what the model's
  context leaves behind the prompt. A prompt that leaves no room is refused as `context_length_exceeded`.
- Sampling parameters that a request leaves out are those of the model's generation_config.json, else
  neutral.
- `seed` makes an answer repeatable; the choices of one request have seeds of their own, derived from it.
- Stop strings are found wherever tokens end, and are not part of the text; a stop string that is a special
  token works as its id. Below `min_tokens` neither stop strings nor stop tokens end an answer. Log
  probabilities are those of the delivered text; those of the stop token are left out, though `usage` counts
  it.
- A request may take `X-Request-Timeout` seconds (by default the setting), and ends within a second of the
  client's leaving. `X-Request-Id` is taken and returned; one that is unusable is replaced.
- Errors are OpenAI's error object. A stream's status is open until its first token, so that errors before
  it are HTTP errors; after `keep_alive_interval` seconds of silence the headers go out with a comment. From
  then on an error is the last event, without a finish reason and without `[DONE]`. `Retry-After` says when
  another try can succeed; `X-Should-Retry: false`, that none will.
"""
