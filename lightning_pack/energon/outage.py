"""Waiting for an object store that is away, for a bounded time, and telling that from an answer that stays the same."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from multistorageclient.types import PreconditionFailedError, RetryableError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Statuses below 500 that ask for patience: request timeout, too many requests.
_PASSING = (408, 429)
_LASTING = (
    FileNotFoundError,
    PermissionError,
    PreconditionFailedError,
    NotImplementedError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
#: What botocore raises when the network fails, by class name; its other errors are about settings and credentials.
_NETWORK = {
    "ConnectionError",
    "CredentialRetrievalError",
    "HTTPClientError",
    "IncompleteReadError",
    "MetadataRetrievalError",
}


class StorageError(ValueError):
    """An object store that did not answer for too long, or cannot be used at all."""


@dataclass(frozen=True, kw_only=True)
class StorageRetry:
    """How long an object store may be away.

    Args:
        outage_seconds: how long a request is repeated while the store cannot be reached, answers with an error of its own (a
            status of 500 or more, 408, 429) or breaks off; then the run ends with an error. 0 repeats nothing.
        request_seconds: how long the store may be silent within one request. It holds for S3 and its kin, where the profile in
            the configuration of the multi-storage client does not set ``connect_timeout`` and ``read_timeout`` itself.

    Raises:
        ValueError: for seconds that are negative, and for no seconds at all within a request.
    """

    outage_seconds: float = 45.0
    request_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name, value, least in (("outage_seconds", self.outage_seconds, 0), ("request_seconds", self.request_seconds, 0.01)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: a number of seconds of at least {least} is needed")


#: Of this process, and of those that are forked from it.
_retry = StorageRetry()


def current_retry() -> StorageRetry:
    """What holds now."""
    return _retry


def use_retry(retry: StorageRetry) -> None:
    """What holds from now on."""
    global _retry
    _retry = retry


def patiently(call: Callable[[], T], *, what: str) -> T:
    """The result of a request that may be repeated, waiting for an outage to end.

    Raises:
        StorageError: if the outage lasts longer than :class:`StorageRetry` allows.
    """
    began, attempts = None, 0
    while True:
        try:
            return call()
        except Exception as error:
            if not is_outage(error):
                raise
            attempts += 1
            now = time.monotonic()
            began = now if began is None else began
            # Spread over the processes, so that a store that comes back is not asked by all at once.
            delay = min(0.25 * 2**attempts, 5.0) * (1 + os.getpid() % 16 / 32)
            left = _retry.outage_seconds - (now - began)
            if left <= 0:
                times = f"{attempts} time{'s' * (attempts > 1)} within {now - began:.0f} s"
                raise StorageError(
                    f"{what} failed {times} (outage_seconds={_retry.outage_seconds:g}): {reason(error)}. Nothing was skipped: "
                    "once the store answers, resume from the last checkpoint, or start an unfinished upload again. Check the "
                    "store and the profile's endpoint; for longer outages raise outage_seconds (StorageRetry, "
                    "--data.storage_retry.outage_seconds), or copy the data to a local disk"
                ) from error
            logger.warning("%s failed (%s); trying again for %.0f s", what, reason(error), left)
            time.sleep(min(delay, left))


def is_outage(error: BaseException) -> bool:
    """Whether to try again: the store could not be reached, broke off, or says that the fault is its own."""
    if isinstance(error, RetryableError | ConnectionError | TimeoutError):
        return True
    # The multi-storage client makes a RuntimeError of whatever it does not know.
    if not isinstance(error, RuntimeError) or error.__cause__ is None:
        return False
    for cause in _chain(error.__cause__):
        status = _status(cause)
        if status is not None:
            return status >= 500 or status in _PASSING
        names = {kind.__name__ for kind in type(cause).__mro__}
        if "BotoCoreError" in names:
            return bool(names & _NETWORK)
        if isinstance(cause, _LASTING):
            return False
    return True


def reason(error: BaseException) -> str:
    """The innermost message."""
    *_, last = _chain(error)
    return f"{type(last).__name__}: {last}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _status(error: BaseException) -> int | None:
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        # Other stores' libraries give the number as an attribute.
        status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None
