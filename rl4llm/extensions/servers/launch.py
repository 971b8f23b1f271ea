"""Start an inference server, wait until it is healthy, and end all of its processes afterwards.

    with launch("sglang", ["--model-path", "path/to/model"], python="/opt/sglang/bin/python") as server:
        client = SGLangClient(server.url, tokenizer, vocab_size=..., context_length=...)

The server may be installed in another virtual environment: `python` is that environment's interpreter. All flags are
passed to the server unchanged, except ``--host`` and ``--port``, which are checked before it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from rl4llm.commands.output import say
from rl4llm.core.errors import EngineError
from rl4llm.extensions.servers.server_command import SERVER_KINDS, server_command
from rl4llm.runs.run_dir import PRIVATE
from rl4llm.runtime.ports import check_free, describe, holder, url_of
from rl4llm.runtime.supervise import last_lines, last_words, start

LOOK_S, REPORT_S = 0.5, 10.0  # between looks at a server that starts, and between lines about it
HEALTH_DEADLINE_S = 4.0
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0  # before a restart; doubled after each failure in a row
WELL_S = 600.0  # a server that ran this long resets the count of failures in a row


def launch(
    engine: str, flags: Sequence[str] = (), *, python: str | None = None, cpu: bool = False, **options: Any
) -> ServerProcess:
    """Return a server of a known kind, not started yet; see `server_command`, and `ServerProcess` for the options."""
    command = server_command(engine, flags, python=python, cpu=cpu)
    words, environment = command.words, command.environment
    return ServerProcess(
        words, host=command.host, port=command.port, environment=environment, name=engine, **options
    )


class ServerProcess:
    """A server process with everything that it starts, from ``with`` to the end of the block, or of this process.

    However the block or this process ends, even by kill -9, all processes of the server end too:
    `rl4llm.runtime.supervise` runs between the two.

    Args:
        port, host: address to listen on; a port in use is refused before the start.
        log: a file for all output, appended to; None for a temporary file, which is kept.
        environment: variables in addition to this process's.
        ready_within_s: seconds until ``GET /health`` must return 200.
        grace_s: seconds that it may take to end before it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        host: str = "127.0.0.1",
        log: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        name: str = "server",
        ready_within_s: float = 1800.0,
        grace_s: float = 10.0,
    ):
        self.url = url_of(host, port)
        self.name = name
        self.log = Path(log or Path(tempfile.mkdtemp(prefix=f"rl4llm-{name}-{port}-"), "log"))
        self.exit_code: int | None = None
        self._command = list(command)
        self._host, self._port = host, port
        self._environment = environment or {}
        self._ready_within_s, self._grace_s = ready_within_s, grace_s
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()
        self._log_start = 0

    def __enter__(self) -> ServerProcess:
        check_free(self._host, self._port)
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._start()
            self._wait_until_healthy()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code if the server ends within `seconds`, else None; only `stop` asks it to end."""
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.exit_code = self._supervisor.wait(seconds)
        return self.exit_code

    def check(self) -> None:
        """Raise EngineError with the end of the log if the server has died."""
        if self.wait(0) is not None:
            raise EngineError(f"{self.name} died, exit code {self.exit_code}.\n{self.last_words()}")

    def stop(self) -> None:
        """End the server and all its processes, and wait until they have ended; a second call does nothing."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        self._take_note()
        supervisor.terminate()
        try:
            self.exit_code = supervisor.wait(self._grace_s + 40)
        finally:
            for process in self._family:  # empty unless the supervisor itself was killed
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._supervisor = None

    def last_words(self) -> str:
        """Return the last lines of the log with its path."""
        return last_words(self.log, self._log_start)

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.exit_code, self._family = None, set()
        with open(self.log, "ab", opener=partial(os.open, mode=PRIVATE)) as log:
            self._log_start = log.tell()
            self._supervisor = start(self._command, self._environment, self._grace_s, log=log)

    def _wait_until_healthy(self) -> None:
        started, report_s = time.monotonic(), REPORT_S
        while not self._healthy():
            seconds = time.monotonic() - started
            if self.wait(LOOK_S) is not None or seconds > self._ready_within_s:
                state = f"exit code {self.exit_code}" if self.exit_code is not None else "see --ready-within"
                raise EngineError(
                    f"{self.name} was not ready after {seconds:.0f} s ({state}).\n{self.last_words()}"
                )
            self._take_note()
            if seconds >= report_s:
                report_s += REPORT_S
                say(f"Starting {self.name}: {seconds:.0f} s  {self._last_line()}")
        self._take_note()
        self._check_that_it_is_ours()

    def _healthy(self) -> bool:
        """Return whether the server responds, without the proxies in environment variables."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=HEALTH_DEADLINE_S) as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _check_that_it_is_ours(self) -> None:
        """Check the port: while a server starts, another may take its port and respond in its place."""
        pid = holder(self._port)
        if pid is not None and pid not in {process.pid for process in self._family}:
            raise EngineError(f"{describe(pid)} took port {self._port} of {self.name}. Use another --port.")

    def _take_note(self) -> None:
        if self._supervisor is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self._supervisor.pid).children(recursive=True))

    def _last_line(self) -> str:
        lines = last_lines(self.log, self._log_start)
        return next((line for line in reversed(lines) if "/health" not in line), "")  # requests of `_healthy`


def serve(arguments: Sequence[str], *, engine: str | None = None) -> int:
    """Run a server until it ends or this process is asked to end (`rl4llm serve`); return the exit code.

    With ``--restarts N`` a server that dies restarts at the same address with the weights of its command line; a pool
    of servers loads the newest weights before using it. After Ctrl-C the exit code is 130. SIGTERM raises SystemExit
    after the server and its processes have ended.
    """
    options, flags = _parser(engine).parse_known_args(arguments)
    if options.cpu:
        say("Running on a CPU, for tests and small models only.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    server = launch(
        options.engine,
        flags,
        python=options.python,
        cpu=options.cpu,
        log=options.log,
        ready_within_s=options.ready_within,
    )
    say(f"Starting {server.name}; its log is {server.log}")
    try:
        _keep(server, options.restarts)
    except KeyboardInterrupt:
        say(f"{server.name} has stopped.")
        return 128 + signal.SIGINT
    return 0


def _keep(server: ServerProcess, restarts: int) -> None:
    """Serve until asked to end; restart a server that dies at the same address, up to `restarts` times in a row.

    A failure of the first start is not retried: its cause is the command line or the port.
    """
    failures, served = 0, False
    while True:
        began = math.inf  # a start that fails has not served, however long it took
        try:
            with server:
                served, began = True, time.monotonic()
                say(f"{server.name} is ready at {server.url}. Ctrl-C stops it.")
                server.wait()
                server.check()
        except EngineError as error:
            if time.monotonic() - began >= WELL_S:
                failures = 0
            if failures >= restarts or not served:
                raise
            wait_s = min(FIRST_REST_S * 2**failures, LONGEST_REST_S)
            failures += 1
            say(
                f"{error}\nRestarting {server.name} in {wait_s:g} s: restart {failures} of {restarts} in a row."
            )
            time.sleep(wait_s)


def _parser(engine: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl4llm serve" if engine is None else "python -m rl4llm.inference.launch_sgl_server",
        description="Start an inference server, wait until it is healthy, and clean up all its processes on exit.",
        epilog="All other flags are passed to the server, for example --model-path M --port 30000 for SGLang. For vLLM and "
        "the embedded engine, the model's path comes first. --port 0 selects a free port.",
        allow_abbrev=False,  # --py might be a flag of the server
    )
    kinds, default = sorted(SERVER_KINDS), "(default: %(default)s)"
    parser.add_argument(
        "--engine", choices=kinds, default=engine or "sglang", help=f"kind of server {default}"
    )
    parser.add_argument("--python", metavar="PATH", help="Python of the server's environment")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, for tests and small models")
    parser.add_argument("--log", metavar="PATH", help="file for its output, not a temporary one")
    parser.add_argument("--restarts", type=int, default=0, help=f"restarts in a row {default}")
    parser.add_argument("--ready-within", type=float, default=1800.0, help=f"seconds to be healthy {default}")
    return parser


def _exit(number: int, _frame: object) -> None:
    """Exit through every `with` block."""
    sys.exit(128 + number)
