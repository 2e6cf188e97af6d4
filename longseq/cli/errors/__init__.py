"""Errors that become one line, ``error: <path or key>: <what>; <remedy>``, and an exit code. Imports no torch."""


class UserError(Exception):
    """A mistake in flags or configuration. The exit code is 2, or the one of the cause."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
