"""The fields of a record: what is a chat, what is a plain text, and what is neither.

A record has exactly one of these forms; other fields are notes that no encoder reads::

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    {"prompt": "Hi", "completion": "Hello."}
    {"text": "Hello, hello."}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lightning_pack.encoders.base import LeaveOut

#: One turn: ``{"role": "system" | "user" | "assistant", "content": str}``; of chats with images the content is a list of parts.
Message: TypeAlias = dict[str, Any]
#: Checks a content, given what it is in words and what is wrong if it is blank; gives it as the chat template takes it.
ReadContent: TypeAlias = Callable[[Any, str, str], Any]

ROLES = ("system", "user", "assistant")


def read_record(record: Mapping[str, Any]) -> list[Message] | str:
    """The checked chat of a record, as messages, or its plain text.

    Raises:
        LeaveOut: if the record has none of the forms, or more than one, or its form is broken.

    Example:
        >>> read_record({"prompt": "Hi", "completion": "Hello."})
        [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello.'}]
    """
    forms = [form for form in (("messages",), ("prompt", "completion"), ("text",)) if all(name in record for name in form)]
    if not forms:
        raise LeaveOut(
            "corrupt",
            f"it has the fields {sorted(map(str, record))}: 'messages', 'prompt' and 'completion', or 'text' is needed",
            "no known fields",
        )
    if len(forms) > 1:
        both = " and ".join("+".join(form) for form in forms)
        raise LeaveOut(
            "corrupt", f"the record has {both}: keep one of them, it is not clear which is meant", "ambiguous fields"
        )
    if forms[0] == ("text",):
        return read_text(record)
    return read_messages(record)


def read_text(record: Mapping[str, Any]) -> str:
    """The checked ``text`` of a record.

    Raises:
        LeaveOut: if it is missing, no string, or blank.
    """
    if "text" not in record:
        raise LeaveOut("corrupt", f"the record has the fields {sorted(map(str, record))}: 'text' is needed", "no known fields")
    return checked_text(record["text"], "text", "empty text")


def checked_text(value: Any, what: str, problem: str) -> str:
    """A content that is text.

    Args:
        value: the content.
        what: it is, for the message.
        problem: name of the fault of a blank text.

    Raises:
        LeaveOut: if it is no string, blank, or no text.
    """
    if not isinstance(value, str):
        # Which an encoder of images reads.
        parts = " (parts need the family of a vision-language model: vision, or --vision)" if isinstance(value, list) else ""
        raise LeaveOut("corrupt", f"{what} is of type {type(value).__name__}, not a string{parts}", "content not a string")
    if not value.strip():
        raise LeaveOut("empty", f"{what} is blank", problem)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = value[error.start]
        raise LeaveOut("corrupt", f"{what} has half a surrogate pair, {code!a}, which is no text", "broken unicode") from None
    return value


def read_messages(record: Mapping[str, Any], *, content: ReadContent = checked_text) -> list[Message]:
    """The checked turns of a record with ``messages``, or ``prompt`` and ``completion``.

    An optional system message comes first, then user and assistant take turns, and the assistant has the last word.

    Args:
        record: of the dataset.
        content: reads the content of a turn.

    Raises:
        LeaveOut: if the turns are missing, of wrong types or in a wrong order, blank, or contain no assistant turn.
    """
    if record.get("tools"):
        raise LeaveOut("corrupt", "the record has 'tools', which are not supported: leave such records out", "tools")
    if "messages" not in record:
        if not ("prompt" in record and "completion" in record):
            fields = sorted(map(str, record))
            raise LeaveOut(
                "corrupt",
                f"the record has the fields {fields}: 'messages', or 'prompt' and 'completion' are needed",
                "no known fields",
            )
        return [
            {"role": "user", "content": content(record["prompt"], "prompt", "empty message")},
            {"role": "assistant", "content": content(record["completion"], "completion", "empty answer")},
        ]
    turns = record["messages"]
    if not isinstance(turns, list):
        raise LeaveOut("corrupt", f"'messages' is a {type(turns).__name__}, not a list", "messages not a list")
    if not turns:
        raise LeaveOut("empty", "'messages' is an empty list", "no messages")
    messages = [_message(turn, number, content) for number, turn in enumerate(turns, 1)]
    _check_order([message["role"] for message in messages])
    return messages


def _message(turn: Any, number: int, content: ReadContent) -> Message:
    if not isinstance(turn, Mapping):
        raise LeaveOut("corrupt", f"message {number} is a {type(turn).__name__}, not an object", "message not an object")
    role = turn.get("role")
    if role not in ROLES:
        raise LeaveOut("corrupt", f"message {number} has the role {role!r}, not one of {', '.join(ROLES)}", "unknown role")
    unused = sorted(str(name) for name, value in turn.items() if name not in ("role", "content") and value is not None)
    if unused:
        raise LeaveOut(
            "corrupt",
            f"message {number} has the fields {unused}, which are not used: leave only 'role' and 'content'",
            "unused fields",
        )
    problem = "empty answer" if role == "assistant" else "empty message"
    return {"role": role, "content": content(turn.get("content"), f"the content of message {number}", problem)}


def _check_order(roles: list[str]) -> None:
    turns = roles[1:] if roles[0] == "system" else roles
    if "assistant" not in turns:
        raise LeaveOut("no_targets", "no message is the assistant's, so there is nothing to learn", "no assistant message")
    for index, role in enumerate(turns):
        expected = ("user", "assistant")[index % 2]
        if role != expected:
            number = index + 1 + len(roles) - len(turns)
            raise LeaveOut(
                "corrupt",
                f"message {number} has the role {role!r} where {expected!r} is due: an optional system message comes first, "
                "then user and assistant take turns",
                "wrong role order",
            )
    if turns[-1] != "assistant":
        raise LeaveOut(
            "corrupt", f"the last message is the {turns[-1]}'s, not the assistant's", "last message not the assistant's"
        )
