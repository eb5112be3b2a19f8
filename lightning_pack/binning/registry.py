"""Packers by name, and the options that each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature

#: Indices of the lengths, by group.
Groups = list[list[int]]
#: ``packer(lengths, capacity, **options)``, lengths and capacity in tokens.
Packer = Callable[..., Groups]

#: Keywords of :func:`lightning_pack.binning.pack` itself.
_RESERVED = ("algorithm", "min_bins", "bins_multiple_of")

_PACKERS: dict[str, Packer] = {}


def register_packer(name: str) -> Callable[[Packer], Packer]:
    """Decorator that makes a packer usable by its name, as in ``PackingPolicy(algorithm=name)``.

    A packer is called as ``packer(lengths, capacity, **options)`` and gives groups of indices into ``lengths``. Its options
    are its keyword-only parameters; each needs a default. A packer with an option ``max_sources`` can be used where the
    number of sources in a bin is limited. It is tried without lengths where a policy is made.

    Raises:
        ValueError: if the name is taken, or the function cannot be called like that.
    """

    def register(packer: Packer) -> Packer:
        if name in _PACKERS:
            raise ValueError(f"a packer called {name!r} is registered already: choose another name")
        _check_signature(name, packer)
        _PACKERS[name] = packer
        return packer

    return register


def _check_signature(name: str, packer: Packer) -> None:
    parameters = signature(packer).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"packer {name!r} takes any option (**): name its options as keyword-only parameters")
    for parameter in parameters:
        if parameter.kind is not Parameter.KEYWORD_ONLY:
            continue
        if parameter.default is Parameter.empty:
            raise ValueError(f"option {parameter.name!r} of packer {name!r} has no default: give it one")
        if parameter.name in _RESERVED:
            raise ValueError(f"packer {name!r} has an option {parameter.name!r}, which pack() has itself: choose another name")
    try:
        signature(packer).bind([], 1)
    except TypeError as error:
        raise ValueError(f"packer {name!r} cannot be called as packer(lengths, capacity): {error}") from None


def packers() -> list[str]:
    """Names of all registered packers, sorted."""
    return sorted(_PACKERS)


def get_packer(name: str) -> Packer:
    """The packer registered as ``name``.

    Raises:
        ValueError: naming the registered ones, if there is none.
    """
    if name not in _PACKERS:
        raise ValueError(f"algorithm {name!r} is not known; known are {', '.join(packers())}")
    return _PACKERS[name]


def packer_options(name: str) -> frozenset[str]:
    """Names of the options that a packer takes.

    >>> sorted(packer_options("first_fit_shuffle"))
    ['max_sources', 'seed']

    Raises:
        ValueError: naming the registered packers, if ``name`` is none of them.
    """
    parameters = signature(get_packer(name)).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY)
