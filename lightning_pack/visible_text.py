"""Text of data, made safe to show: nothing in it can command a terminal or turn the direction of what follows."""

from __future__ import annotations

import unicodedata

#: Controls, formats, surrogates, private and unassigned code points, separators of lines and paragraphs.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
#: Joiners, which only shape the letters and emoji around them.
_SHAPING = frozenset("\u200c\u200d")


def visible(text: str) -> str:
    r"""The text with everything that is not seen written out, such as ``\x1b``.

    >>> print(visible("red\x1b[31m and\nnext\u202e"))
    red\x1b[31m and\nnext\u202e
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN or character in _SHAPING:
        return character
    return character.encode("unicode_escape").decode("ascii")
