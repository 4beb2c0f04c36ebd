"""Stands in for a role in tests of the launcher: notes its start and stop in a file, and answers like a router.

`stub_role.py NAME JOURNAL [--port PORT] [--fail CODE] [--deaf]`
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from pdserve import tether

tether.follow_parent_from_environment()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--fail", type=int)
    parser.add_argument("--deaf", action="store_true")
    arguments = parser.parse_args()
    # Waited for, not handled: two in a row would meet in the lock of an Event that a handler sets.
    stop = signal.SIGUSR1 if arguments.deaf else signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, {stop})

    def note(event: str) -> None:
        with arguments.journal.open("a", encoding="utf-8") as journal:
            journal.write(f"{event} {arguments.name} {os.getpid()}\n")

    if arguments.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("start")
    if arguments.fail is not None:
        print(f"{arguments.name} cannot work.", file=sys.stderr)
        return int(arguments.fail)
    note("up")
    if arguments.port is not None:
        server = ThreadingHTTPServer(("127.0.0.1", arguments.port), make_handler(arguments.journal))
        threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait({stop})
    time.sleep(0.1)
    note("stop")
    return 0


def make_handler(journal: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = [line.split() for line in journal.read_text(encoding="utf-8").splitlines()]
            up = {name for event, name, pid in lines if event == "up" and psutil.pid_exists(int(pid))}
            self.answer({"nodes": [{"id": name, "state": "ready"} for name in up]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer({"choices": []})

        def answer(self, body: dict[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    return Handler


if __name__ == "__main__":
    sys.exit(main())
