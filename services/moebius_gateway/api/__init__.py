"""HTTP dialects over one internal request and one stream of events.

The way of a request: a dialect's `*_request.py` validates the body and translates it to a `GenerationRequest`
(request.py); prepare.py makes of it prompts, a grammar (constraint.py) and choices (choices.py), each a
`Generation` for the worker side; generate.py runs them; delivery.py sends what comes (text/parsing/events.py)
in one piece (answer.py) or as events, through the dialect's `*_answer.py`.

What clients can rely on is docs/api.md. What whoever changes this must keep:

- A parameter is honoured or refused by name: a body is a `Strict` model, and what is not supported stands in
  its `neutral`. parameter_table.py makes the document's tables of both.
- A stream's status is open until its first token, so that errors before it are HTTP errors; after
  `keep_alive_interval` seconds of silence the headers go out with a comment. From then on an error is the
  last event, in the dialect's shape.
- Per delta there is no pydantic, and as little else as possible.
"""
