"""Workspaces as their callers use them, and that nothing is left of them."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces import WorkspaceError, Workspaces
from rl4llm.extensions.workspaces import pool as pool_module
from rl4llm.extensions.workspaces.namespaces import workspace_user
from rl4llm.extensions.workspaces.start import Running, oom_kills

ROOT = str(Path(__file__).parents[3])


def sh(command, **options):
    """Return a scenario that runs a command of the shell."""
    return lambda workspace: workspace.run(["sh", "-c", command], wall_s=30, **options)


def test_files_stay_and_processes_do_not(play):
    async def scenario(workspace):
        await sh("echo 42 > answer; sleep 100 & echo $! > /tmp/pid")(workspace)
        second = await sh("cat answer; kill -0 $(cat /tmp/pid) || echo gone")(workspace)
        return second, await workspace.read("answer"), await workspace.read("nothing")

    second, answer, nothing = play(scenario)
    assert second.output.startswith("42\n") and second.output.endswith("gone\n")
    assert answer == b"42\n" and nothing is None


def test_a_result_has_code_environment_and_directory(play):
    scenario = sh("cat; echo $NAME; pwd; echo last >&2; exit 3", env={"NAME": "value"}, cwd="/new/place")
    result = play(scenario)
    assert (result.code, result.output) == (3, "value\n/new/place\nlast\n")


def test_a_program_has_separate_streams(play):
    async def scenario(workspace):
        program = await workspace.start(["sh", "-c", "read line; echo got $line; echo problem >&2; exit 5"])
        program.stdin.write(b"this\n")
        return await program.stdout.read(), await program.stderr.read(), await program.wait()

    assert play(scenario) == (b"got this\n", b"problem\n", 5)


def test_a_timeout_kills_all_processes(play):
    async def scenario(workspace):
        result = await workspace.run(["sh", "-c", "setsid sleep 77.7 & echo begun; sleep 77.7"], wall_s=0.5)
        names = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        return result, [name for name in names if name and "77.7" in name]

    result, left = play(scenario)
    assert result.timed_out and result.code is None and result.output == "begun\n" and left == []


@pytest.mark.parametrize("words", [["no-such-program"], ["/etc"], ["/root/removed"]])
def test_a_program_that_cannot_start_has_code_127(words, play):
    assert play(lambda workspace: workspace.run(words, wall_s=30)).code == 127


def test_a_cancelled_run_leaves_nothing_running(play):
    async def scenario(workspace):
        task = asyncio.ensure_future(workspace.run(["sleep", "88.8"], wall_s=100))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        return await sh("ls /proc | grep -c '^[0-9]'")(workspace)

    assert int(play(scenario).output) <= 4


def test_workspaces_do_not_see_each_other(pool):
    async def scenario():
        first, second = await pool.open(), await pool.open()
        await first.write("/root/x", b"first")
        seen = await second.read("/root/x")
        await first.close()
        await second.close()
        return seen

    assert asyncio.run(scenario()) is None


def test_open_waits_for_a_place():
    pool = Workspaces(count=1)

    async def scenario():
        first = await pool.open()
        second = asyncio.ensure_future(pool.open())
        await asyncio.sleep(0.3)
        waits = not second.done()
        await first.close()
        await (await second).close()
        return waits

    assert asyncio.run(scenario())
    pool.close()


@pytest.fixture
def echo(tmp_path):
    """Servers of the host, at a Unix socket and a port, that answer in capitals."""

    def serve(server):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connection.sendall(connection.recv(100).upper())
            connection.close()

    path = tempfile.mktemp(prefix="rl4llm-echo-")
    servers = [socket.create_server(("127.0.0.1", 0)), socket.create_server(path, family=socket.AF_UNIX)]
    os.chmod(path, 0o777)
    for server in servers:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    yield path, servers[0].getsockname()[1]
    for server in servers:
        server.close()
    os.remove(path)


def talk(port):
    return f"""
import socket
try:
    c = socket.create_connection(('127.0.0.1', {port}), 5); c.sendall(b'hello'); print(c.recv(100).decode())
except OSError as e: print('no', e)"""


def test_a_port_reaches_its_address_and_no_other(play, echo):
    path, port = echo

    async def scenario(workspace):
        outputs = []
        for number in (8001, 8002, port):
            result = await workspace.run(["/usr/bin/python3", "-c", talk(number)], wall_s=30)
            outputs.append(result.output.strip())
        return outputs

    through_path, through_port, other = play(scenario, sockets={8001: path, 8002: f"127.0.0.1:{port}"})
    assert through_path == through_port == "HELLO" and other.startswith("no")


DIES = """
import asyncio, sys, time
from rl4llm.extensions.workspaces import Workspaces
async def main():
    pool = Workspaces(count=20)
    workspaces = [await pool.open() for _ in range(int(sys.argv[1]))]
    for workspace in workspaces:
        program = await workspace.start(["sh", "-c", "setsid sleep 99.9 & echo; sleep 99.9"])
        await program.stdout.readline()
    print(pool._keeper.base, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["trainer", "keeper and trainer"])
def test_nothing_is_left_of_a_killed_trainer(_walls, victim, tmp_path):
    command = [sys.executable, "-c", DIES, "5"]
    environ = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as trainer:
        base = trainer.stdout.readline().strip()
        members = psutil.Process(trainer.pid).children(recursive=True)
        if victim != "trainer":
            psutil.Process(trainer.pid).children()[0].kill()
        trainer.kill()
    assert len(members) > 10
    psutil.wait_procs(members, timeout=30)
    assert [process for process in members if process.is_running() and process.status() != "zombie"] == []
    if victim != "trainer":  # its directory goes with the next pool
        assert Path(base).exists()
        pool = Workspaces()
        asyncio.run(_opened(pool))
        pool.close()
    deadline = time.monotonic() + 30
    while Path(base).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(base).exists()
    assert base not in Path("/proc/mounts").read_text()


async def _opened(pool):
    workspace = await pool.open()
    await workspace.close()


def test_a_killed_keeper_is_an_error_and_the_next_open_works(_walls):
    pool = Workspaces()

    async def scenario():
        workspace = await pool.open()
        os.kill(pool._keeper._process.pid, signal.SIGKILL)
        with pytest.raises(WorkspaceError):
            await workspace.run(["sleep", "10"], wall_s=30)
        await workspace.close()
        await _opened(pool)

    asyncio.run(scenario())
    pool.close()


def test_close_removes_files_without_permissions(pool):
    async def scenario():
        workspace = await pool.open()
        await sh("mkdir -p a/b; touch a/b/c; chmod 0 a/b a")(workspace)
        await workspace.close()
        return list(pool._keeper.base.glob("*/upper"))

    assert asyncio.run(scenario()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of another user")
@pytest.mark.parametrize("lock", ["fifo", "file"])
def test_directories_of_other_users_are_left_alone(lock, tmp_path, monkeypatch):
    base = tmp_path / f"{pool_module.PREFIX}bwrap-x"
    base.mkdir()
    os.mkfifo(base / "lock") if lock == "fifo" else (base / "lock").touch()
    os.chown(base, 65534, 65534)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sweeping = threading.Thread(target=pool_module._sweep, args=("bwrap",), daemon=True)
    sweeping.start()
    sweeping.join(10)
    assert not sweeping.is_alive() and base.exists()


@pytest.mark.parametrize(
    ("code", "before", "key"), [(1, 0, "code"), (1, 1, "error"), (0, 1, "code"), (137, 1, "error")]
)
def test_a_program_beside_a_kill_for_memory_has_no_verdict(code, before, key):
    """The kernel's count of kills has grown since the start by `before`."""
    (status, events), (ready, mounted), (end, reply) = os.pipe(), os.pipe(), os.pipe()
    os.write(events, json.dumps({"exit-code": code}).encode())
    for descriptor in (events, mounted):
        os.close(descriptor)
    running = Running(1, 0, [], 0, _reply=reply, _status=status, _ready=ready, oom_kills=oom_kills() - before)
    running.finish(killed=False)
    with open(end) as file:
        assert key in json.loads(file.read())


def test_a_disk_without_free_inodes_is_the_machines_fault(_walls, tmp_path, monkeypatch):
    command = ["mount", "-t", "tmpfs", "-o", "nr_inodes=5000", "none", tmp_path]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = Workspaces()

    async def scenario():
        workspace = await pool.open()
        try:
            return await workspace.run(["sh", "-c", "sleep 2; exit 1"], wall_s=30)
        finally:
            await workspace.close()

    try:
        with pytest.raises(WorkspaceError, match="disk"):
            asyncio.run(scenario())
    finally:
        pool.close()
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_unprivileged_user_has_workspaces_too(_walls):
    python = "/usr/bin/python3"
    code = """
import asyncio, sys
from rl4llm.extensions.workspaces import Workspaces
async def main():
    pool = Workspaces(memory_bytes=100 << 20)
    workspace = await pool.open()
    result = await workspace.run(["sh", "-c", "id -u; echo 42 > x; ls -A /home; cat /etc/shadow; kill -0 %d" % 1], wall_s=30)
    print(result.output.split(), await workspace.read("x"))
    bomb = await workspace.run(["python3", "-c", "x = []\\nwhile True: x.append(bytearray(8 << 20))"], wall_s=30)
    print(bomb.code)
    await workspace.close(); pool.close()
asyncio.run(main())
"""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o777)
        environ = {"PYTHONPATH": ROOT, "HOME": home, "PATH": os.environ["PATH"]}
        command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, "-c"]
        possible = subprocess.run([*command, "import rl4llm.core.schema"], env=environ, capture_output=True)
        if possible.returncode:
            pytest.skip("an unprivileged user cannot import this package")
        done = subprocess.run([*command, code], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith("['0', "), done.stderr
    assert "b'42\\n'\n137\n" in done.stdout


def test_root_has_a_user_for_workspaces_in_a_small_container():
    if os.getuid() != 0:
        pytest.skip("only root chooses users")
    assert workspace_user("0 0 4294967295") == 1_900_000_000
    assert workspace_user("0 100000 65536") == 65535
    assert workspace_user("0 1000 1") == 0


@pytest.mark.parametrize("options", [{"image": "./nothing"}, {"count": 0}])
def test_a_wrong_option_is_refused_before_anything_starts(options):
    with pytest.raises(ConfigError):
        Workspaces(**options)


def test_without_user_namespaces_open_names_them(_walls):
    code = """
import asyncio
from rl4llm.extensions.workspaces import Workspaces
pool = Workspaces()
try:
    asyncio.run(pool.open())
finally:
    pool.close()"""
    command = [
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        "--unshare-user",
        "--disable-userns",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True)
    assert "WorkspaceError: namespaces: user namespaces" in done.stderr


def test_a_missing_bwrap_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigError):
        Workspaces()
