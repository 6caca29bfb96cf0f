"""The one error of the command: a line that says what is wrong and what to do."""


class CliError(Exception):
    """Shown to the user as it is, without a traceback; the command then exits with status 1."""
