"""What a client is told when a request cannot be served, in a form that each dialect puts in its own shape."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served.

    Attributes:
        status: HTTP status. message: for the caller. code: machine-readable. param: the field at fault.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def kind(self) -> str:
        """The error's type, as OpenAI names them."""
        return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
