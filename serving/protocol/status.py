"""Defines errors of requests: gRPC's canonical codes, and TensorFlow Serving's HTTP statuses for them."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """The numbers of gRPC, absl::StatusCode and tensorflow.error.Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# All other codes are the server's fault, status 500.
_HTTP = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.OUT_OF_RANGE: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 412,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}


class RequestError(Exception):
    """A request that cannot be answered."""

    def __init__(self, code: Code, message: str, *, http_status: int | None = None) -> None:
        """`http_status`: default: the code's status."""
        super().__init__(message)
        self.code, self.message = code, message
        self.http_status = http_status or _HTTP.get(code, 500)


def invalid(message: str) -> RequestError:
    return RequestError(Code.INVALID_ARGUMENT, message)


def timeout_message(timeout: float) -> str:
    """Returns the message for a request that exceeded --timeout."""
    return f"The request did not arrive, or was not answered, within {timeout:g} s."


def too_large(limit: int) -> RequestError:
    """Returns the error for a body that is larger than the limit."""
    return RequestError(
        Code.RESOURCE_EXHAUSTED,
        f"The body of a request may have at most {limit} bytes, also when decompressed. Received: more. Send fewer "
        "rows, or start the server with a larger --max-message-mb.",
        http_status=413,
    )
