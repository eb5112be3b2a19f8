"""What the pages of the project say: their blocks of code, and the code in their sentences."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("lightning_pack", "configs", "notebooks", "tests")
#: The program, as a command line of a page may call it.
PROGRAM = "lightning-pack"


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the number of its first line, its language ("" where none is said) and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page, those of folders that come later included."""
    found = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
    return [ROOT / "README.md", *sorted(page for page in found if ".ipynb_checkpoints" not in page.parts)]


def read(page: Path) -> tuple[list[Block], str]:
    """The blocks of a page, and its text without them.

    Raises:
        ValueError: for a block that does not end.
    """
    blocks: list[Block] = []
    prose: list[str] = []
    fence, start, language, inside = "", 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        mark = re.match(r"( *)(`{3,})(.*)$", line)
        if not fence and mark and "`" not in mark[3]:
            fence, start, language, inside, indent = mark[2], number + 1, mark[3].strip(), [], len(mark[1])
        elif fence and mark and mark[2].startswith(fence) and not mark[3].strip():
            blocks.append(Block(page, start, language, "\n".join(inside) + "\n"))
            fence = ""
        elif fence:
            inside.append(line[indent:] if line[:indent].isspace() else line)
        else:
            prose.append(line)
    if fence:
        raise ValueError(f"{page}:{start}: the block has no end")
    return blocks, "\n".join(prose)


def code_in(prose: str) -> list[str]:
    """What stands between backticks, line ends as blanks."""
    return [re.sub(r"\s+", " ", each) for each in re.findall(r"`([^`]+)`", re.sub(r"<!--.*?-->", "", prose, flags=re.S))]


def commands(text: str) -> list[list[str]]:
    """The command lines of a shell block as words: joined where a line goes on, without comments, ``&&`` taken apart."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "||", ";", "|")), len(words))
            if words[:end]:
                found.append(words[:end])
            words = words[end + 1 :]
    return found


def program_arguments(words: list[str]) -> list[str] | None:
    """What a command line gives to ``lightning-pack``; None where it starts something else."""
    words = words[next((i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)), 0) :]
    if words and Path(words[0]).name == PROGRAM:
        return words[1:]
    if len(words) > 2 and Path(words[0]).name.startswith("python") and words[1:3] == ["-m", "lightning_pack"]:
        return words[3:]
    return None


def anchors(text: str) -> set[str]:
    """The names of the headings of a page in links."""
    heads = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
