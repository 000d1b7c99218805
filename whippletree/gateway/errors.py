"""What the gateway answers when it does not answer with a reply; each API writes it in its own shape."""

from __future__ import annotations


class ApiError(Exception):
    """An answer with an HTTP status, for the client to read: `code` for programs, `message` for people.

    `param` names the request's field at fault. `retry_after` (seconds) says that the same request may succeed then.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's own mistake, which no repetition will mend."""
    return ApiError(400, message, param=param, code=code)
