"""Messages to prompt text, by the model's own template. Torch-free; renders as transformers does, in a sandbox.

The template comes with the model and the data from a caller: neither may reach Python, and what either breaks is told
to the caller as InvalidRequest.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigError, InvalidRequest
from engine.tokenizer import read_optional_json, special_tokens

MAX_PROMPT_CHARACTERS = 32_000_000
MAX_RENDER_S = 10.0
_MAX_MESSAGE_CHARACTERS = 300
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_WIDE_FORMAT = re.compile(r"%[^A-Za-z%]*(\d{5}|\*)")
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """One model's template or templates. Thread-safe: rendering changes nothing here."""

    def __init__(self, templates: Mapping[str, str], special: Mapping[str, str]) -> None:
        """`templates` holds `default`, and may hold `tool_use`, taken when there are tools."""
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except (jinja2.TemplateError, RecursionError) as error:
                raise ConfigError(f"The model's chat template cannot be used: {_short(error)}") from error
        self._special = dict(special)

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """None when the model has no template. ConfigError when it has one that cannot be used."""
        templates = _read_templates(folder)
        return cls(templates, special_tokens(folder)) if templates else None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: plain JSON objects; keys that are null count as absent.
            tools: plain JSON objects, as in the request.
            add_generation_prompt: end with the opening of an assistant message.
            continue_final_message: leave the last message open, to be continued.
            extra: further variables of the template.

        Raises:
            InvalidRequest: the template refuses the messages, or something in them breaks it.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
            )
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        conversation = [_prepared(message) for message in messages]
        if continue_final_message:
            _mark_end(conversation)
        variables: dict[str, object] = {**self._special, **(extra or {})}
        for own in _OWN_VARIABLES:
            variables.pop(own, None)
        text = _render(
            self._compiled[name],
            {
                **variables,
                "messages": conversation,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_mark(text) if continue_final_message else text


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    """Without nulls, which many templates would write as the word None, and with reasoning under the names in use."""
    kept = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((kept[name] for name in names if name in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    """Append a mark to the text of the last message."""
    content = conversation[-1].get("content") if conversation else None
    if isinstance(content, str):
        conversation[-1]["content"] = content + _CONTINUE_TAG
        return
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + _CONTINUE_TAG}
                conversation[-1]["content"] = [*content[:index], marked, *content[index + 1 :]]
                return
    raise InvalidRequest("continue_final_message needs a last message that has text", param="messages")


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUE_TAG.strip())
    if position < 0:
        raise InvalidRequest("the chat template drops the last message, so it cannot be continued", param="messages")
    if text[position : position + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:position]
    # The template trims messages, so the mark lost its space; what stood before it would have been trimmed too.
    return text[:position].rstrip()


def _render(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    deadline = time.monotonic() + MAX_RENDER_S
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_PROMPT_CHARACTERS:
                raise _TooMuch(f"the rendered prompt is longer than {MAX_PROMPT_CHARACTERS} characters")
            if time.monotonic() > deadline:
                raise _TooMuch(f"rendering took longer than {MAX_RENDER_S:g} s")
    except Exception as error:  # a template runs any expression on the caller's data, so any error can come out of it
        raise InvalidRequest(f"the chat template refuses these messages: {_short(error)}", param="messages") from error
    return "".join(pieces)


def _short(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[:_MAX_MESSAGE_CHARACTERS] + "..."


def _read_templates(folder: Path) -> dict[str, str]:
    single = folder / "chat_template.jinja"
    if single.exists():
        named: object = single.read_text(encoding="utf-8")
    else:
        named = read_optional_json(folder / "chat_template.json").get("chat_template")
        if named is None:
            named = read_optional_json(folder / "tokenizer_config.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(named, str):
        templates["default"] = named
    elif isinstance(named, dict):
        templates = {str(name): text for name, text in named.items() if isinstance(text, str)}
    elif isinstance(named, list):
        for item in named:
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                templates[str(item.get("name"))] = item["template"]
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates.setdefault(file.stem, file.read_text(encoding="utf-8"))
    if templates and "default" not in templates:
        raise ConfigError(f"{folder} has chat templates ({', '.join(sorted(templates))}) but none named default.")
    return templates


class _TooMuch(Exception):
    """The template makes more than a prompt can be."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also bounds what one expression can build."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                repeats = isinstance(sequence, str | list | tuple) and isinstance(count, int)
                if repeats and len(sequence) * count > MAX_PROMPT_CHARACTERS:
                    raise _TooMuch("a repetition is too long")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 64:
            raise _TooMuch("an exponent is too large")
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise _TooMuch("a format is too wide")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace()` without underscore names, which could reach Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values: dict[str, Any] = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _new_dict,
    }
    environment.globals.update(functions)
    return environment


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """In place of the class, whose attributes a template could reach."""
    return dict(*args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
