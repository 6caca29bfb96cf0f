"""What can be wrong with a model's text side, and with a text that is given to it."""


class TextError(Exception):
    """The tokenizer's files cannot be used. The message says which file and why."""


class PromptError(Exception):
    """The request's messages or prompt cannot be turned into tokens. The message is for the client."""
