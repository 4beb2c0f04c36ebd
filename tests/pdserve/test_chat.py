"""The terminal chat against a server of a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Server(ThreadingHTTPServer):
    """Answers each question with its messages' contents, piece by piece."""

    asked: list[dict[str, object]]
    keys: list[str | None]
    cut_off = False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        question = body["messages"][-1]["content"]
        if question == "refuse":
            self._answer(400, b'{"error": {"message": "messages: too long"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in ("You said ", question, " é"):
            self._event({"choices": [{"delta": {"content": piece}}]})
        if question == "fail":
            self._event({"error": {"message": "no node is ready"}})
        elif question != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.asked, server.keys = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def chat(server: Server, typed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve", "chat", "--url", f"http://127.0.0.1:{server.server_port}", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env=os.environ | {"PYTHONUTF8": "1"},
        timeout=30,
    )


def test_piped_conversation_remembers_and_resets(server: Server) -> None:
    done = chat(
        server, "hello\n\nagain\n/reset\nfresh\n", "--system", "Be brief.", "--temperature", "0", "--api-key", "k"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "You said hello é\nYou said again é\nYou said fresh é\n"
    first, second, third = server.asked
    assert first == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        "stream": True,
        "temperature": 0.0,
    }
    messages = second["messages"]
    assert isinstance(messages, list)
    assert messages[2] == {"role": "assistant", "content": "You said hello é"}
    assert third["messages"] == [{"role": "user", "content": "fresh"}]
    assert server.keys == ["Bearer k"] * 3


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("refuse", "pdserve: the server answers 400: messages: too long"),
        ("fail", "pdserve: no node is ready"),
        ("cut", "pdserve: the answer was cut off"),
    ],
)
def test_failure_is_one_sentence_and_the_chat_goes_on(server: Server, question: str, sentence: str) -> None:
    done = chat(server, f"{question}\nhello\n")
    assert done.returncode == 0  # of the last question
    assert done.stderr.strip() == sentence
    assert done.stdout.endswith("You said hello é\n")
    assert chat(server, question).returncode == 1


def test_nobody_there_is_one_sentence(server: Server) -> None:
    server.server_close()
    done = chat(server, "hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("pdserve: http://127.0.0.1:")
    assert done.stderr.count("\n") == 1
