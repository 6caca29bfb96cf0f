"""What can be wrong with a model's text side, and with a text that is given to it."""


class TextError(Exception):
    """The tokenizer's files cannot be used. The message says which file and why."""


class UnsupportedError(Exception):
    """It cannot be enforced in this family's format. `param` is what asks for it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptError(Exception):
    """The request cannot be turned into a prompt for this model. The message is for the client.

    `param` names what is to blame, where that is known.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
