"""Chat messages as users write them, checked: all mistakes of all conversations in one error.

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]

A list of messages is one conversation, a list of such lists several; a list of texts stays a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from deepinfer_compile.runtime.errors import RequestError

Message = Mapping[str, str]
Conversation = Sequence[Message]
Prompts = str | Sequence[str] | Conversation | Sequence[Conversation]


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Turn:
    """A checked message. `reasoning`: what the assistant thought before it said `content`."""

    role: Role
    content: str
    reasoning: str | None


Prompt = str | tuple[Turn, ...]

_KEYS = {
    Role.SYSTEM: ("content",),
    Role.USER: ("content",),
    Role.ASSISTANT: ("content", "reasoning_content"),
}
_HELP = (
    'a conversation is [{"role": "user", "content": "..."}], the user\'s message last; '
    "token ids: prompt_token_ids"
)


def read_prompts(given: Prompts) -> list[Prompt]:
    """Texts as they are, conversations checked. E024: both in one list, or neither; E039: messages
    that are none, with the prompt, the message and the key of each."""
    if isinstance(given, str):
        return [given]
    one = bool(given) and all(isinstance(item, Mapping) for item in given)
    batch: list[object] = [given] if one else list(given)
    if all(isinstance(item, str) for item in batch):
        return [str(item) for item in batch]
    odd = [(i, item) for i, item in enumerate(batch) if not _is_list(item)]
    if odd:
        kinds = ", ".join(f"prompt {i} is {type(item).__name__}" for i, item in odd[:5])
        help = f"texts only, or conversations only: {_HELP}"
        raise RequestError("E024", f"prompts are texts or conversations: {kinds}", help=help)
    problems: list[str] = []
    read = [tuple(_turns(f"prompt {i}", item, problems)) for i, item in enumerate(batch)]
    if problems:
        raise RequestError("E039", "these are no messages", notes=problems, help=_HELP)
    return list(read)


def _is_list(item: object) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)


def _turns(where: str, conversation: object, problems: list[str]) -> Iterator[Turn]:
    assert isinstance(conversation, Sequence)
    found = len(problems)
    role: Role | None = None
    for i, message in enumerate(conversation):
        place = f"{where}, message {i}"
        if not isinstance(message, Mapping):
            problems.append(f"{place} is {type(message).__name__}, not a dict")
            continue
        role = _role(place, message, problems)
        if role is not None:
            fine = len(problems)
            _check_keys(place, role, message, problems)
            if len(problems) == fine:
                yield Turn(role, message["content"], message.get("reasoning_content"))
    if len(problems) == found and role is not Role.USER:
        problems.append(f"{where} ends with {role or 'nothing'}: the model answers a user")


def _role(place: str, message: Mapping[str, object], problems: list[str]) -> Role | None:
    role = message.get("role")
    if role is None:
        problems.append(f"{place} has no `role`")
    elif role not in tuple(Role):
        problems.append(f"{place}, role: {role!r} is none of {', '.join(Role)}")
    return next((one for one in Role if one == role), None)


def _check_keys(place: str, role: Role, message: Mapping[str, object], problems: list[str]) -> None:
    if "content" not in message:
        problems.append(f"{place} has no `content`")
    for key, value in message.items():
        if key in _KEYS[role] and not isinstance(value, str):
            problems.append(f"{place}, {key}: {type(value).__name__}, not a text")
        elif key not in ("role", *_KEYS[role]):
            problems.append(f"{place}, {key}: a message of {role} has {', '.join(_KEYS[role])}")
