"""A request that cannot be served gets a status, a code for programs, and one sentence that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A reply other than 200: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def token_ids(owner: Mapping[str, Any], name: str, vocab_size: int, where: str = "") -> tuple[int, ...] | None:
    """Field ``name`` as token ids, or None where it is absent.

    Raises:
        ApiError: it is not a list of ids of this model.
    """
    value = owner.get(name)
    if value is None:
        return None
    param = f"{where}{name}"
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ApiError(400, "invalid_type", f"{param} must be a list of token ids", param)
    wrong = next((item for item in value if not 0 <= item < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400, "invalid_value", f"{param} has token id {wrong}; this model's are 0..{vocab_size - 1}", param
        )
    return tuple(value)
