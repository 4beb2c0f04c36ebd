"""A chat in the terminal with any server that speaks OpenAI's protocol. Knows nothing of what is behind the URL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from pdserve.status import error_message

HELP = "/reset starts over, /system TEXT sets the system message, /exit or Ctrl-D leaves; Ctrl-C stops an answer."


class ChatError(Exception):
    """The server cannot be asked, or refuses; one sentence."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Whom to ask, and how.

    Attributes:
        url: base URL, with or without /v1.
        model: None takes the first that is served.
        api_key: sent as bearer token.
        system: first message.
        temperature, top_p, max_tokens, seed: sent when set.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Conversation:
    """Messages so far, and the next answer."""

    def __init__(self, client: httpx.Client, model: str, settings: ChatSettings) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self.messages: list[dict[str, str]] = []
        self.start_over(settings.system)

    def start_over(self, system: str | None) -> None:
        """Forget every message but the system message."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they come. Whatever came is remembered, also when the caller stops early."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()  # a question without an answer would break the alternation of roles

    def _stream(self) -> Iterator[str]:
        options = {name: getattr(self._settings, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        body: dict[str, Any] = {"model": self._model, "messages": self.messages, "stream": True}
        body |= {name: value for name, value in options.items() if value is not None}
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ChatError(f"the server answers {response.status_code}: {error_message(response)}")
                yield from _read_events(response)
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error


def _read_events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatError("the server sent something that is not JSON") from error
        if "error" in event:
            raise ChatError(str(event["error"].get("message", "the server failed")))
        for choice in event.get("choices", []):
            if content := choice.get("delta", {}).get("content"):
                yield content
    raise ChatError("the answer was cut off")


def run(settings: ChatSettings) -> int:
    """Chat until the input ends; the exit code: 1 when the last question got no full answer."""
    base_url = settings.url.rstrip("/")
    base_url = base_url if base_url.endswith("/v1") else base_url + "/v1"
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    interactive = sys.stdin.isatty()
    console = Console(highlight=False)
    try:
        with httpx.Client(
            base_url=base_url, headers=headers, trust_env=False, timeout=httpx.Timeout(10.0, read=600.0)
        ) as client:
            model = settings.model or _first_model(client)
            conversation = Conversation(client, model, settings)
            if interactive:
                console.print(f"[bold]{model}[/] at {base_url}\n[dim]{HELP}[/]")
            return _talk(conversation, console, interactive=interactive)
    except (ChatError, httpx.InvalidURL) as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("models")
    except httpx.HTTPError as error:
        raise ChatError(f"{client.base_url} does not answer: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise ChatError(f"{client.base_url} answers {response.status_code}: {error_message(response)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ChatError(f"{client.base_url} names no model; pass --model") from error


def _talk(conversation: Conversation, console: Console, *, interactive: bool) -> int:
    code = 0
    while True:
        try:
            text = _read_line(console, interactive=interactive)
        except EOFError:
            return code
        except KeyboardInterrupt:
            console.print()
            return code
        if text in ("/exit", "/quit"):
            return code
        if text == "/reset" or text.startswith("/system "):
            conversation.start_over(text.removeprefix("/system ").strip() if text != "/reset" else None)
        elif text == "/help":
            console.print(HELP)
        elif text:
            code = _answer(conversation, text)


def _read_line(console: Console, *, interactive: bool) -> str:
    if interactive:
        return console.input("[bold cyan]> [/]").strip()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


def _answer(conversation: Conversation, text: str) -> int:
    answer = conversation.ask(text)
    try:
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            answer.close()  # type: ignore[attr-defined]  # closes the connection, which cancels the request
        print(" [stopped]")
        return 0
    except ChatError as error:
        print(f"\npdserve: {error}", file=sys.stderr)
        return 1
    print()
    return 0
