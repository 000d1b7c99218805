"""Messages to prompt ids, through the model's own chat template.

    prompt of turn k+1 = prompt ids of turn k + reply ids of turn k + ids of what the template adds after them

whenever the new messages extend the old ones and our reply among them; what was sampled is never tokenised again.
Where the harness changed our reply a little, the changed span alone is tokenised (realign). Where it changed more, or
the template leaves earlier reasoning out, the prompt is rendered anew, with the replies that still stand in it (fork).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

from whippletree.gateway.chatform import Images, clean, joined, keys_of, one_call_each, spelled
from whippletree.gateway.continuing import THINK, Continuing
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.memory import Known, Memory
from whippletree.gateway.realign import realigned
from whippletree.gateway.toolcalls import FORMATS, ToolFormat, format_of
from whippletree.types import Json, Link

CACHED = 256  # texts
REALIGN_LIMIT = 16  # tokens
KEY = 16  # bytes of a key, see `chatform.keys_of`
A_TOOL: Json = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
USER, SYSTEM = {"role": "user", "content": "x"}, {"role": "system", "content": "x"}
ANSWER: Json = {"role": "tool", "content": "y", "tool_call_id": "abcdefghi"}
Form = Callable[[Sequence[Json]], list[Json]]


@dataclass(frozen=True)
class Prompt:
    """What the model sees of one call, and how it follows from the turns before."""

    ids: tuple[int, ...]
    key: bytes  # of the messages and tools: what the reply answers, then what it goes on with
    link: Link = "root"
    parent: str = ""  # id of the turn that it continues, whole or in part
    drift: int = 0  # tokens of earlier replies that stand in it as newly tokenised text
    dropped_reasoning: bool = False  # of earlier replies, by the harness or the template
    forced: str = ""  # how the prompt opened the reply's call
    begun: str = ""  # text of the client's with which the prompt opened the reply
    opened: int = 0  # tokens of either
    thinking: bool = False  # the prompt opened the reply's reasoning
    opening: bytes = b""  # key of the messages up to the first that is not the system's
    place: int = 0  # of the reply among the messages
    thought: frozenset[int] = frozenset()  # places of replies whose reasoning stands in it

    def noted(self) -> Json:
        """What `Memory.remember` reads of it in a turn's info, and what a trainer may want to know."""
        known = {"key": self.key[:KEY].hex(), "opening": self.opening.hex(), "place": self.place, "parent": self.parent}
        known |= {"drift": self.drift, "dropped_reasoning": self.dropped_reasoning, "forced": self.forced}
        return known | {"begun": self.begun, "opened": self.opened, "thought": sorted(self.thought)}


class Renderer:
    """Renders chats for one tokenizer. `realign_limit`: tokens of a reply that may have been changed, see `Prompt`.

    A template without tools, or that names no format of calls known here, gets them in the system message, unless
    `tools_in_prompt` is False: then they are refused. `images` is called with each image of a request, whatever API it
    came by, as {"type": "image_url", "image_url": {"url": ...}} with an address or `data:` URL. It gives the text that
    stands for it in the prompt, by which the engine's processor finds the image again; equal images get equal text.
    Without it images are refused.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        realign_limit: int = REALIGN_LIMIT,
        tools_in_prompt: bool = True,
        images: Images | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"a chat needs the model's own template, but the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} "
                f"has no chat_template; use an instruction-tuned model, or set tokenizer.chat_template"
            )
        self.tokenizer, self._limit, self._images = tokenizer, realign_limit, images
        self._ids = lru_cache(CACHED)(self._tokenized)  # a group's rollouts share their prompts
        self._special = frozenset(tokenizer.all_special_ids)
        self._ends = tuple(tokenizer.all_special_tokens)
        self._mark = "q" + secrets.token_hex(8)  # nothing else writes it
        self._forms: list[Form] = []
        template = tokenizer.get_chat_template(tools=[A_TOOL])
        self.has_tools = self._shows_tools()
        self.tool_format: ToolFormat | None = format_of(template) if self.has_tools else None
        self._spelled = self.tool_format is None and tools_in_prompt
        if self._spelled:
            self.tool_format = FORMATS["hermes"]
        self._adapt()
        self.thinking: tuple[str, str] | None = THINK if THINK[1] in template else None
        begins = self._raw([USER], [])
        bare = self._raw([USER], [], generation=False)
        self.opens_thinking = bool(self.thinking) and begins[len(bare) :].rstrip().endswith(THINK[0])
        self._calls_needed = not self._fits([USER, {"role": "assistant", "content": "a"}, ANSWER, _said("b")])
        self._before_call = self._opening_of_calls()
        self._continues = self._may_begin()
        self.digests: Json = {
            "template": sha256(str(tokenizer.chat_template).encode()).hexdigest(),
            "tokenizer": _tokenizer_digest(tokenizer),
        }

    def prompt(
        self, messages: Sequence[Json], tools: Sequence[Json], memory: Memory, *, tool_choice: str = "auto"
    ) -> Prompt:
        """The prompt of these messages, continuing the turns of `memory` where they extend them.

        A last message of the assistant with `prefix` set is the beginning of the reply.

        Raises:
            ApiError: a message cannot be rendered, or tools are given to a model that has no way to write them (400).
        """
        self._check_tools(tools)
        chat = [clean(message, place, self._images) for place, message in enumerate(messages)]
        begins = chat and chat[-1]["role"] == "assistant" and messages[-1].get("prefix") is True
        begun = self._begun(chat.pop(), tool_choice) if begins else ""
        keys = keys_of(chat, tools)
        continuing = Continuing(self, chat, tools, keys, memory)
        found = continuing.found()
        forced = self._forced(tool_choice, tools)
        opened = self._ids(forced + begun)
        closes = self._ids("\n" + THINK[1] + "\n\n") if opened and self.opens_thinking else ()
        return Prompt(
            found.ids + closes + opened,
            keys[-1] + begun.encode(),
            found.link,
            found.parent,
            found.drift,
            found.dropped_reasoning,
            forced=forced,
            begun=begun,
            opened=len(opened),
            thinking=self.opens_thinking and not opened,
            opening=continuing.opening,
            place=len(chat),
            thought=found.thought,
        )

    def digest_of_tools(self, tools: Sequence[Json]) -> str:
        """Equal for equal lists of tools; "" for none."""
        return blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).hexdigest() if tools else ""

    def _forced(self, tool_choice: str, tools: Sequence[Json]) -> str:
        if not tools or tool_choice in ("auto", "none"):
            return ""
        assert self.tool_format
        return self.tool_format.opening("" if tool_choice == "required" else tool_choice)

    def _begun(self, message: Json, tool_choice: str) -> str:
        """The beginning of the reply that the client wrote."""
        why = "" if self._continues else "this model's chat template does not end its prompts where a reply begins"
        why = why if tool_choice in ("auto", "none") else f"`tool_choice` is {tool_choice}"
        if other := sorted({"tool_calls", "reasoning_content"} & message.keys()):
            why = f"it holds {', '.join(other)} too"
        if why:
            told = "a reply goes on with the text of a last message that is the assistant's, but "
            raise bad_request(told + why, param="messages")
        return str(message["content"])

    # ---- the template, and what it cannot take ----

    def _shows_tools(self) -> bool:
        try:
            return self._raw([USER], [A_TOOL]) != self._raw([USER], [])
        except ApiError:
            return False

    def _adapt(self) -> None:
        """Find what the template cannot take, and bring chats into a form that it can."""
        if self._spelled:
            self._forms.append(lambda chat: spelled(chat, ()))
        two = [_call_of("f", n) for n in ("abcdefghi", "abcdefghj")]
        calls = {"role": "assistant", "content": "", "tool_calls": two}
        if not self._spelled and not self._fits([USER, calls, ANSWER, {**ANSWER, "tool_call_id": "abcdefghj"}]):
            self._forms.append(one_call_each)
        if not (self._fits([USER, USER]) and self._fits([SYSTEM, USER, SYSTEM])):
            self._forms.append(joined)

    def _fits(self, chat: Sequence[Json]) -> bool:
        try:
            self.text(chat, [])
        except ApiError:
            return False
        return True

    def _opening_of_calls(self) -> str | None:
        """What the template writes between the head of a reply and the name of its first call."""
        try:
            head = self.text([USER], [])
            call = self.text([USER, self.marked({}, 0, calls=True)], [], generation=False)
        except ApiError:
            return None
        place = call.find(self.name_of(0))
        return call[len(head) : place] if place >= 0 and call.startswith(head) else None

    def _may_begin(self) -> bool:
        """Whether the template writes a reply's text where its prompts end."""
        try:
            head, whole = self.text([USER], []), self.text([USER, _said(self._mark)], [], generation=False)
        except ApiError:
            return False
        head = head.rpartition(THINK[0])[0] if self.opens_thinking else head
        said = whole[len(head) :].partition(self._mark)
        return whole.startswith(head) and bool(said[1]) and (self.opens_thinking or not said[0].strip())

    def _check_tools(self, tools: Sequence[Json]) -> None:
        if tools and self.tool_format is None:
            why = "names no call format known here" if self.has_tools else "has none"
            raise bad_request(f"`tools` need a model whose chat template has tools, but this one {why}", param="tools")

    def text(self, chat: Sequence[Json], tools: Sequence[Json], *, generation: bool = True) -> str:
        """The chat as the template writes it."""
        if self._spelled:
            chat, tools = spelled(chat, tools), ()
        for form in self._forms:
            chat = form(chat)
        return self._raw(chat, tools, generation=generation)

    def _raw(self, chat: Sequence[Json], tools: Sequence[Json], *, generation: bool = True) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(chat), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # templates are programs of the model's authors: they raise what they like
            raise bad_request(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return text

    def _tokenized(self, text: str) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise bad_request(f"messages are Unicode text, but these hold half a character: {error}") from error
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids_of(self, text: str) -> tuple[int, ...]:
        """The ids of a text of the template."""
        return self._ids(text)

    # ---- replies that stand in a rendered chat as marks ----

    def name_of(self, place: int) -> str:
        """The mark of the reply at this place."""
        return f"{self._mark}r{place}z"

    def thought_of(self, place: int) -> str:
        """The mark of its reasoning."""
        return f"{self._mark}t{place}z"

    def marked(self, message: Json, place: int, *, calls: bool = False, more: str = "") -> Json:
        """A reply whose text, or whose call's name, is its mark; `more` is text after it."""
        if calls or (self._calls_needed and message.get("tool_calls")):
            tool_id = message["tool_calls"][0]["id"] if message.get("tool_calls") else "abcdefghi"
            return {"role": "assistant", "content": "", "tool_calls": [_call_of(self.name_of(place), tool_id)]}
        return {"role": "assistant", "content": self.name_of(place) + more}

    def split(self, text: str, chat: Sequence[Json], place: int) -> tuple[str, str] | None:
        """The text before the reply that is marked at this place, and the text after it; `None`: it is not there."""
        parts = text.split(self.name_of(place))
        if len(parts) != 2:
            return None
        before, after = parts
        if not (self._calls_needed and chat[place].get("tool_calls")):
            return before, after
        ends = [at for end in self._ends if (at := after.find(end)) >= 0]
        opening = self._before_call
        if opening is None or not ends or not before.endswith(opening):
            return None
        return before[: len(before) - len(opening)], after[min(ends) :]

    def follows(self, text: str, last_id: int) -> tuple[int, ...]:
        """Ids of a text that follows a reply. A closing token that was sampled is not repeated."""
        ids = self._ids(text)
        if last_id in self._special and last_id in ids:
            end = ids.index(last_id)
            if not self.tokenizer.decode(ids[:end]).strip():
                return ids[end + 1 :]
        return ids

    def said(self, known: Known) -> str:
        """The text of a reply that no special token ended; "" for others."""
        ids = known.reply_ids
        return "" if not ids or ids[-1] in self._special else str(self.tokenizer.decode(list(ids)))

    def visible(self, known: Known) -> tuple[int, ...] | None:
        """The ids of its reply after its reasoning; `None` where no token ends with the reasoning."""
        ids = known.reply_ids
        for count in range(1, len(ids) + 1):
            text = self.tokenizer.decode(list(ids[:count]), skip_special_tokens=True)
            if THINK[1] in text:
                break
        else:
            return None
        while count < len(ids) and not self.tokenizer.decode([ids[count]]).strip():
            count += 1
        return ids[count:] if self.tokenizer.decode(list(ids[:count])).rstrip().endswith(THINK[1]) else None

    def changed(self, known: Known, content: str) -> tuple[int, tuple[int, ...] | None]:
        """(tokens of the changed spans, the reply with them exchanged), see `realigned`."""
        old = known.message["content"]
        return realigned(self.tokenizer, known.reply_ids, old, content, self._ids, limit=self._limit)


def _said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def _call_of(name: str, call_id: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def _tokenizer_digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return sha256(text.encode("utf-8", "replace")).hexdigest()
