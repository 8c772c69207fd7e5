"""A request that cannot be served gets a status, a code for programs, and one sentence that names the field."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from gymloop.errors import ConfigError, DataError, InfraError

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """A reply other than 200: ``{"error": {"message", "type", "param", "code"}}``.

    Attributes:
        retry_after_s: whole seconds after which the same request may succeed; None where it will not.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: int | None = None
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply beside its type and length."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def server_closing() -> ApiError:
    """What a request is told that the end of the server cut short."""
    return ApiError(503, "server_closing", "the server is closing; the request was ended")


class ClientGone(Exception):
    """The client closed its connection; nobody waits for a reply."""


def refusal_of(error: Exception, where: str) -> ApiError:
    """What a client is told of ``error``; what nobody expected is logged with its traceback.

    Args:
        error: raised while a request was served.
        where: the route, for the log.
    """
    match error:
        case ApiError():
            return error
        case ClientGone():
            return ApiError(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client closed the connection")
        case DataError():
            return ApiError(400, getattr(error, "code", "invalid_conversation"), str(error), "messages")
        case ConfigError():  # the engine samples no such thing: the same request will not do later either
            return ApiError(400, "invalid_value", str(error))
        case RecursionError():
            return ApiError(400, "invalid_value", "the request is nested too deeply")
        case InfraError():
            log.error("%s: %s", where, error)
            return ApiError(503, "engine_failed", str(error))
        case _:
            log.error("%s: the request failed", where, exc_info=error)
            return ApiError(500, "internal_error", f"{type(error).__name__}: {error}")


def token_ids(owner: Mapping[str, Any], name: str, vocab_size: int, where: str = "") -> tuple[int, ...] | None:
    """Field ``name`` as token ids, or None where it is absent.

    Raises:
        ApiError: it is not a list of ids of this model.
    """
    value = owner.get(name)
    if value is None:
        return None
    param = f"{where}{name}"
    # Prompts are long and come with every turn: few passes, all in C, no Python per id.
    if not isinstance(value, list) or list(map(type, value)).count(int) != len(value):
        raise ApiError(400, "invalid_type", f"{param} must be a list of token ids", param)
    if value and not _all_below(value, vocab_size):
        wrong = next(item for item in value if not 0 <= item < vocab_size)
        raise ApiError(
            400, "invalid_value", f"{param} has token id {wrong}; this model's are 0..{vocab_size - 1}", param
        )
    return tuple(value)


def _all_below(ids: list[int], vocab_size: int) -> bool:
    """Whether every one of some ids, at least one, is in ``0..vocab_size - 1``."""
    try:
        # Measured: ten times as fast as min and max of the list.
        packed = struct.pack(f"{len(ids)}I", *ids)
    except struct.error:  # an id below 0 or beyond 32 bits
        return False
    return bool(np.frombuffer(packed, dtype=np.uintc).max() < vocab_size)
