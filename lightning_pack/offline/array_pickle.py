"""The pickle inside an ``.npy`` file of objects, read as data: containers, numbers, text and plain arrays, and nothing else.

Names are not the only danger of a pickle. ``numpy.ndarray`` and ``numpy.dtype`` themselves take raw memory: objects made of
bytes are addresses, and reading them ends the process or worse. So neither is handed out. An array is made here, of a list of
objects or of the bytes of numbers and text, and its size is compared.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np

#: Names of the dtypes whose bytes mean nothing but themselves.
_PLAIN = re.compile(r"[biufUS?]\d{0,9}|O8?")
_CORES = ("numpy.core", "numpy._core")


class ArrayUnpickler(pickle.Unpickler):
    """Makes nothing but built-in containers, numbers, text and arrays of them.

    Raises:
        pickle.UnpicklingError: for a pickle that asks for more; other errors for one that is damaged.
    """

    def find_class(self, module: str, name: str) -> Any:
        """One of the few names that an array consists of; methods, which a pickle cannot change."""
        known = {
            **{(f"{core}.multiarray", "_reconstruct"): self._array for core in _CORES},
            **{(f"{core}.multiarray", "scalar"): self._scalar for core in _CORES},
            # Only named, as the argument of _reconstruct.
            ("numpy", "ndarray"): "numpy.ndarray",
            ("numpy", "dtype"): self._kind,
            ("_codecs", "encode"): self._latin1,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[module, name]

    def _array(self, *_: Any) -> _Array:
        # Its content follows.
        return _Array((0,), dtype=np.uint8)

    def _kind(self, name: Any, *_: Any) -> _Kind:
        return _Kind(name)

    def _scalar(self, kind: Any, content: Any) -> Any:
        (value,) = _values((1,), kind, content)
        return value

    def _latin1(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
        return text.encode("latin1")


class _Kind:
    """Stands for a dtype."""

    def __init__(self, name: Any) -> None:
        if type(name) is not str or not _PLAIN.fullmatch(name):
            raise pickle.UnpicklingError(f"it asks for the dtype {name!r:.80}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        # Version, byte order, and what a dtype of fields or of a part of an array has.
        if state[1] not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError(f"it asks for a dtype of several parts, {state!r:.80}")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray):
    """An array that takes its content checked."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        values = _values(shape, kind, content).reshape(shape, order="F" if fortran else "C").ravel()
        stored = values.tolist() if values.dtype.hasobject else values.tobytes()
        super().__setstate__((1, shape, values.dtype, False, stored))  # type: ignore[arg-type]


def _values(shape: Any, kind: Any, content: Any) -> np.ndarray:
    """The elements of an array in the order in which they are stored, ``[n]``."""
    if type(kind) is not _Kind or type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("it holds an array without a shape or dtype")
    count, dtype = math.prod(shape), kind.dtype
    if dtype.hasobject:
        if type(content) is not list or len(content) != count:
            raise pickle.UnpicklingError(f"it holds an array of {count} objects that are no such list")
        return np.fromiter(content, dtype=object, count=count)
    if type(content) is not bytes or len(content) != count * dtype.itemsize:
        raise pickle.UnpicklingError(f"it holds an array of {count} {dtype} in another number of bytes")
    return np.frombuffer(content, dtype=dtype, count=count)
