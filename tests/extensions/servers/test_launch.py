"""Inference servers are started with checked command lines, watched while they boot, and leave nothing behind.

The servers here are a small stand-in that forks children as real ones do; one child hides as a daemon. The real ones of
test_router.py are started the same way.
"""

import ast
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

import rl4llm
from rl4llm.core.errors import ConfigError, EngineError
from rl4llm.extensions.servers import launch as module
from rl4llm.extensions.servers.launch import ServerProcess
from rl4llm.extensions.servers.server_command import SERVER_KINDS, SERVERS, server_command
from rl4llm.runtime.ports import free_port

STAND_IN = r"""#!{python}
import http.server, os, signal, sys, time

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def note():
    with open(option("--pids"), "a") as pids:
        pids.write(f"{{os.getpid()}}\n")

def stay(seconds=600):
    note()
    time.sleep(seconds)
    os._exit(0)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

mode = option("--mode")
if mode == "dies":
    for number in range(100):
        print("line", number, flush=True)
    print("died at", time.time(), flush=True)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
note()
if os.fork() == 0:  # a worker
    stay()
if os.fork() == 0:  # a daemon: its parent dies, and it leaves the group and the session
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        stay()
    os._exit(0)
os.wait()
if mode == "silent":
    print("loading weights", flush=True)
    time.sleep(600)
http.server.HTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""
FAMILY = 3  # processes of a stand-in
PATIENCE_S = 30.0
LAUNCHER = (sys.executable, "-m", "rl4llm.inference.launch_sgl_server")


@pytest.fixture
def stand_in(tmp_path):
    """A program that takes the place of a server environment's Python."""
    path = tmp_path / "python"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def launch(stand_in, tmp_path):
    """Starts launchers, as a shell does; those that a test leaves are stopped after it."""
    started = []

    def start(*flags, mode="serves", command=LAUNCHER, stderr=subprocess.PIPE):
        own = [
            "--python", stand_in, "--log", tmp_path / "log", "--pids", tmp_path / "pids", "--mode", mode, "--port",
            "0",
        ]  # fmt: skip
        process = subprocess.Popen(
            [*command, *map(str, own), *flags], stderr=stderr, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.wait()
        if process.stderr:
            process.stderr.close()


def until(condition, what):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)
    return value


def pids(tmp_path):
    """The processes of the stand-in, once all have said who they are: the server first."""
    path = tmp_path / "pids"

    def complete():
        lines = path.read_text().split() if path.exists() else []
        return len(lines) == FAMILY and [int(line) for line in lines]

    return until(complete, "a complete family")


def family_of(launcher):
    return psutil.Process(launcher.pid).children(recursive=True)


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def server_in(family):
    """The server itself: the child of the supervisor that the launcher started."""
    return family[0].children()[0]


def until_ready(launcher):
    for line in launcher.stderr:
        if "is ready at" in line:
            return line.split()[4].rstrip(".")
    raise AssertionError("the launcher ended before its server was ready")


def until_all_are_gone(family):
    until(lambda: not any(map(runs, family)), f"the end of {family}")


def end(way, launcher, family):
    if way == "crash":
        server_in(family).kill()
    elif way == "ctrl-c":  # a terminal sends it to the whole group
        os.killpg(launcher.pid, signal.SIGINT)
    else:
        launcher.send_signal(signal.SIGTERM if way == "sigterm" else signal.SIGKILL)
    return launcher.wait(PATIENCE_S)


@pytest.mark.parametrize("way, code", [("ctrl-c", 130), ("sigterm", 143), ("kill -9", -9), ("crash", 1)])
@pytest.mark.parametrize("moment", ["ready", "booting"])
def test_no_process_is_left_on_any_exit(launch, tmp_path, way, code, moment):
    launcher = launch(mode="serves" if moment == "ready" else "silent")
    noted = pids(tmp_path)
    if moment == "ready":
        until_ready(launcher)
    family = family_of(launcher)
    assert set(noted) < {process.pid for process in family}
    assert end(way, launcher, family) == code
    until_all_are_gone(family)


def test_the_command_of_the_package_serves_too(launch, tmp_path):
    launcher = launch(command=(sys.executable, "-m", "rl4llm", "serve"))
    url = until_ready(launcher)
    assert urllib.request.urlopen(f"{url}/health").status == 200
    assert int(url.rsplit(":", 1)[1]) < 32768
    family = family_of(launcher)
    assert end("ctrl-c", launcher, family) == 130
    assert "sglang has stopped." in launcher.stderr.read()
    until_all_are_gone(family)


def test_server_that_dies_at_start_shows_its_log(launch):
    launcher = launch(mode="dies")
    assert launcher.wait(PATIENCE_S) == 1
    ended = time.time()
    output = launcher.stderr.read()
    assert "exit code 3" in output
    assert re.findall(r"^line (\d+)$", output, re.MULTILINE) == [str(number) for number in range(61, 100)]
    assert ended - float(re.search(r"died at ([\d.]+)", output)[1]) < 5


def test_server_that_dies_restarts_at_its_address(launch):
    launcher = launch("--restarts", "1")
    url = until_ready(launcher)
    first = family_of(launcher)
    server_in(first).kill()
    said = "".join(itertools.takewhile(lambda line: "is ready at" not in line, launcher.stderr))
    assert re.search(rf"died, exit code {128 + signal.SIGKILL}\.\nThe last lines of .*log:", said)
    assert "Restarting sglang in 1 s: restart 1 of 1 in a row." in said
    assert urllib.request.urlopen(f"{url}/health").status == 200
    until_all_are_gone(first)
    second = family_of(launcher)
    server_in(second).kill()
    assert launcher.wait(PATIENCE_S) == 1
    assert "Restarting" not in launcher.stderr.read()
    until_all_are_gone(second)


def test_server_that_dies_at_its_first_start_is_not_restarted(launch):
    launcher = launch("--restarts", "3", mode="dies")
    assert launcher.wait(PATIENCE_S) == 1
    assert launcher.stderr.read().count("died at") == 1


def test_a_restart_that_is_never_ready_counts_however_long(stand_in, tmp_path, monkeypatch):
    server, _ = stand_in_server(stand_in, tmp_path, "serves")
    said = []

    def say(text):
        said.append(text)
        assert len(said) < 5, "it never gives up"
        if "is ready at" in text:
            server._command[2] = "dies"
            server_in([psutil.Process(server._supervisor.pid)]).kill()

    for name, value in (("say", say), ("WELL_S", 0.0), ("FIRST_REST_S", 0.0)):
        monkeypatch.setattr(module, name, value)
    with pytest.raises(EngineError):
        module._keep(server, 2)
    assert len(said) == 3


def test_a_launcher_that_waits_before_a_restart_can_be_stopped(launch):
    launcher = launch("--restarts", "9")
    until_ready(launcher)
    server_in(family_of(launcher)).kill()
    assert any("Restarting sglang in" in line for line in launcher.stderr)
    assert end("ctrl-c", launcher, None) == 130


def test_a_server_that_never_answers_is_stopped_at_the_deadline(launch, tmp_path):
    launcher = launch("--ready-within", "1", mode="silent")
    pids(tmp_path)
    family = family_of(launcher)
    assert launcher.wait(PATIENCE_S) == 1
    assert not any(map(runs, family))


def test_port_in_use_is_refused_and_its_holder_named(launch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        launcher = launch("--port", str(port))
        assert launcher.wait(PATIENCE_S) == 1
    output = launcher.stderr.read()
    assert f"Port {port} on 127.0.0.1 is in use by process {os.getpid()}" in output
    assert "--port" in output
    assert not (tmp_path / "pids").exists()


def stand_in_server(stand_in, tmp_path, mode, **options):
    port = free_port("127.0.0.1")
    words = [stand_in, "--mode", mode, "--port", port, "--pids", tmp_path / "pids"]
    return ServerProcess([str(word) for word in words], port=port, log=tmp_path / "log", **options), port


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_server_that_took_the_port_is_not_mistaken_for_ours(stand_in, tmp_path):
    server, port = stand_in_server(stand_in, tmp_path, "silent")
    with ThreadingHTTPServer(("127.0.0.1", port), _Healthy, bind_and_activate=False) as other:

        def take():
            pids(tmp_path)
            other.server_bind()
            other.server_activate()
            other.serve_forever()

        thread = threading.Thread(target=take)
        thread.start()
        with pytest.raises(EngineError):
            server.__enter__()
        other.shutdown()
        thread.join()
    assert not any(map(psutil.pid_exists, pids(tmp_path)))


def test_server_that_ignores_stop_is_killed(stand_in, tmp_path):
    server, _ = stand_in_server(stand_in, tmp_path, "stubborn", grace_s=0.3)
    with server:
        server.check()
        family = pids(tmp_path)
    assert server.exit_code == 128 + signal.SIGKILL
    assert not any(map(psutil.pid_exists, family))
    server.stop()


def test_a_killed_supervisor_takes_the_server_with_it(stand_in, tmp_path):
    server, _ = stand_in_server(stand_in, tmp_path, "serves")
    with server:
        family = [psutil.Process(pid) for pid in pids(tmp_path)]
        family[0].parent().kill()
        assert server.wait(PATIENCE_S) is not None
    until_all_are_gone(family)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_server_ends_if_launcher_and_supervisor_are_killed(launch, tmp_path):
    launcher = launch()
    until_ready(launcher)
    server, *children = [psutil.Process(pid) for pid in pids(tmp_path)]
    server.parent().suspend()
    launcher.kill()
    server.parent().kill()
    until_all_are_gone([server])
    for child in children:  # nobody is left to end them; SGLang's end with their parent
        child.kill()


def test_exception_in_the_block_stops_the_server(stand_in, tmp_path):
    server, _ = stand_in_server(stand_in, tmp_path, "serves")
    with pytest.raises(ZeroDivisionError), server:
        family = pids(tmp_path)
        _ = 1 / 0
    assert not any(map(psutil.pid_exists, family))


def test_start_shows_the_last_log_line(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rl4llm.extensions.servers.launch.REPORT_S", 0.1)
    server, _ = stand_in_server(stand_in, tmp_path, "silent", ready_within_s=2)
    server.log.write_text("of an earlier server\n")
    with pytest.raises(EngineError, match=r"The last lines of .*log:\nloading weights$"):
        server.__enter__()
    shown = capsys.readouterr().err
    assert "loading weights" in shown and "earlier" not in shown


def words(*flags, engine="sglang", **options):
    """The command line after the interpreter."""
    return server_command(engine, flags, python=sys.executable, **options).words[1:]


def test_every_flag_of_the_server_goes_through_as_it_is(launch, tmp_path):
    given = [
        "--tp", "2", "--cpu-offload-gb=4", "--py-spy", "--log-level", "info", "--model-path", "m", "-x", '{"a": 1}',
    ]  # fmt: skip
    launcher = launch(*given)
    until_ready(launcher)
    server = server_in(family_of(launcher)).cmdline()
    start = server.index("sglang.launch_server")
    assert [word for word in server[start + 1 : -4] if word in given] == given
    assert server[-4:-1] == ["--host", "127.0.0.1", "--port"]


def test_the_checked_address_is_the_one_that_holds():
    command = server_command(
        "sglang", ["--port", "21000", "--host=127.0.0.1", "--port=21001", "-v"], python=sys.executable
    )
    assert command.words[3] == "-v" and command.words[-4:] == ("--host", "127.0.0.1", "--port", "21001")
    assert (command.host, command.port) == ("127.0.0.1", 21001)
    assert words("--model-path", "m")[-1] == "30000"
    assert words("m", engine="vllm")[-4:] == ("--host", "127.0.0.1", "--port", "8000")
    assert 0 < server_command("sglang", ["--port", "0"], python=sys.executable).port < 32768


def test_a_cpu_server_gets_what_it_needs_unless_told_otherwise():
    line = words("--model-path", "m", "--dtype", "bfloat16", cpu=True)
    assert line[:2] == ("-m", "sglang_cpu")
    assert line.count("--dtype") == 1
    assert line[line.index("--device") + 1] == "cpu"
    assert "--lora-backend" not in line
    adapted = words("--enable-lora", cpu=True)
    assert adapted[adapted.index("--lora-backend") + 1] == "torch_native"
    assert "--device" not in words("--model-path", "m")
    assert words("m", engine="vllm", cpu=True)[:3] == ("-m", "vllm.entrypoints.cli.main", "serve")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_server_that_sleeps_gets_no_expandable_segments(monkeypatch, variable):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")

    def environment(*flags):
        return server_command("sglang", flags, python=sys.executable).environment

    sleeps = environment("--enable-memory-saver")
    assert sleeps[variable] == "max_split_size_mb:64,expandable_segments:False"
    assert len([name for name in sleeps if name.startswith("PYTORCH")]) == 1
    assert variable not in environment()  # what a user has set stays


def test_python_of_the_server_comes_from_option_or_environment(monkeypatch, stand_in):
    monkeypatch.setenv("RL4LLM_SGLANG_PYTHON", str(stand_in))
    command = server_command("sglang")
    assert command.words[0] == str(stand_in)
    assert command.environment["PATH"].startswith(f"{stand_in.parent}:")
    assert server_command("sglang", python=sys.executable).words[0] == sys.executable


def test_router_starts_like_a_server(monkeypatch, stand_in):
    monkeypatch.setenv("RL4LLM_SGLANG_PYTHON", str(stand_in))
    command = server_command(
        "sglang-router", ["--worker-urls", "http://a:1", "http://b:2", "--port", "21000"]
    )
    assert command.words[0] == str(stand_in)
    assert command.words[1:6] == (
        "-m",
        "sglang_router.launch_router",
        "--worker-urls",
        "http://a:1",
        "http://b:2",
    )
    pairs = set(itertools.pairwise(command.words))
    assert {("--policy", "round_robin"), ("--prometheus-host", "127.0.0.1")} <= pairs
    routers = [server_command("sglang-router", ["--worker-urls", "http://a:1"]).words for _ in range(3)]
    second = {words[words.index("--prometheus-port") + 1] for words in routers}
    assert len(second) > 1 and "30100" not in second  # several on one machine, each beside its own port
    assert command.words[-4:] == ("--host", "127.0.0.1", "--port", "21000")
    every_s = command.words.index("--health-check-interval-secs") + 1
    assert int(command.words[every_s]) <= 1  # three checks in vain, and it has left the router's pool
    for_s = command.words.index("--worker-startup-timeout-secs") + 1
    assert int(command.words[for_s]) > 10**7  # a server may be added in the third month
    assert (
        "round_robin"
        not in server_command("sglang-router", ["--policy", "power_of_two"], python=sys.executable).words
    )


def test_two_ports_of_a_router_are_never_the_same(monkeypatch, stand_in):
    drawn = type("Drawn", (), {"sample": lambda self, ports, count: [30100, 30101, 30102]})
    monkeypatch.setattr("random.SystemRandom", drawn)
    monkeypatch.setenv("RL4LLM_SGLANG_PYTHON", str(stand_in))
    words = server_command("sglang-router", ["--worker-urls", "http://a:1", "--port", "30100"]).words
    assert words[words.index("--prometheus-port") + 1] in ("30101", "30102")


def test_vllm_finds_its_worker_extension():
    command = server_command("vllm", ["m"], python=sys.executable)
    module, name = SERVER_KINDS["vllm"].flags["--worker-extension-cls"].split(".")
    tree = ast.parse((SERVERS / f"{module}.py").read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert str(SERVERS) in command.environment["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "gpu-node-3"])
def test_a_server_that_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError):
        words("--host", "127.0.0.1", f"--host={host}")
    with pytest.raises(ConfigError):
        words("--host", host, "--api-key", "k", "--tokenizer-worker-num", "2")
    with pytest.raises(ConfigError):
        words("m", "--host", host, "--api-key", "k", engine="vllm")
    assert words("--host", host, "--api-key", "k")[-4:] == ("--host", host, "--port", "30000")
    assert "5ecret" not in repr(
        server_command("sglang", ["--host", host, "--admin-api-key=5ecret"], python=sys.executable)
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_a_server_that_only_this_machine_reaches_needs_no_key(host):
    assert words("--host", host)[-3] == host


def test_keys_reach_a_server_by_its_environment_alone(monkeypatch):
    monkeypatch.setenv("RL4LLM_SERVER_KEY", "own-5ecret")
    command = server_command(
        "sglang", ["--host", "0.0.0.0", "--admin-api-key=more-5ecret"], python=sys.executable
    )
    assert json.loads(command.environment["RL4LLM_SERVER_FLAGS"]) == ["--admin-api-key", "more-5ecret"]
    command = server_command("sglang", ["--host", "0.0.0.0", "--hf-token"], python=sys.executable, cpu=True)
    assert json.loads(command.environment["RL4LLM_SERVER_FLAGS"]) == ["--api-key", "own-5ecret"]
    assert command.words[1:3] == (str(SERVERS / "with_flags.py"), "sglang_cpu")
    assert "5ecret" not in f"{command.words} {command}" and "--hf-token" in command.words
    command = server_command(
        "vllm", ["--api-key", "one-5ecret", "two-5ecret", "-tp", "2"], python=sys.executable
    )
    assert "5ecret" not in f"{command.words}" and "-tp" in command.words
    assert server_command("sglang", ["--max-total-tokens", "8"], python=sys.executable).words[1] == "-m"


SHOWS = """import json, logging, os, sys, multiprocessing
if __name__ == "__main__":
    logging.warning("options: %s", sys.argv)
    logging.warning("%d: a mistake of the server, which must not end it", "one")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        inherited = pool.apply(os.getenv, ("RL4LLM_SERVER_FLAGS",))
    print(json.dumps([sys.argv[1:], sys.path[0], inherited, open("/proc/self/cmdline").read()]))
"""


@pytest.mark.parametrize("kind", ["script", "module"])
def test_flags_with_keys_are_on_no_command_line_and_in_no_log(kind, tmp_path):
    (tmp_path / "shows.py").write_text(SHOWS)
    target = str(tmp_path / "shows.py") if kind == "script" else "shows"
    found = subprocess.run(
        [sys.executable, SERVERS / "with_flags.py", target, "--port", "1"],
        env={
            **os.environ,
            "RL4LLM_SERVER_FLAGS": json.dumps(["--admin-api-key", "", "--api-key", "own-5ecret"]),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    words, path, inherited, command_line = json.loads(found.stdout)
    assert words == ["--port", "1", "--admin-api-key", "", "--api-key", "own-5ecret"]
    assert path == str(tmp_path) and inherited is None
    assert "own-5ecret" not in command_line + found.stderr and "'--api-key', '(hidden)'" in found.stderr


def test_the_log_of_a_server_is_for_its_owner_only(stand_in, tmp_path):
    server, _ = stand_in_server(stand_in, tmp_path, "serves")
    with server:
        assert server.log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("command", [("rl4llm", "serve"), ("rl4llm.inference.launch_sgl_server",)])
def test_without_its_folder_the_launcher_is_refused(tmp_path, command):
    package = Path(rl4llm.__file__).parent
    shutil.copytree(package, tmp_path / "rl4llm", ignore=shutil.ignore_patterns("servers", "__pycache__"))
    words = [sys.executable, "-m", *command, "--model-path", "m"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        "needs an extension of rl4llm that provides 'serve'" in done.stderr and "Traceback" not in done.stderr
    )
