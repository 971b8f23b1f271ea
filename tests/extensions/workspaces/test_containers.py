"""Workspaces that are containers: real ones of podman, where it can run one."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl4llm.extensions.workspaces import WorkspaceError, Workspaces, containers
from rl4llm.extensions.workspaces import pool as pool_module

NAME = f"localhost/rl4llm-test-{os.getpid()}"  # others on this machine may have theirs
ROOT = str(Path(__file__).parents[3])
# crun of Debian 12 refuses a hierarchy of control groups with both versions, so podman lives where only the first is
HYBRID = "/sys/fs/cgroup/unified"


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    """The path of programs with a podman that runs containers, and the image NAME with a static busybox."""
    command, busybox = shutil.which("podman"), shutil.which("busybox")
    if command is None or busybox is None:
        pytest.skip("podman or busybox is not installed")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "bin").mkdir()
    shutil.copy(busybox, folder / "bin" / "busybox")
    for name in ("sh", "cat", "rm", "mkdir", "sleep", "ps", "nc", "dd", "ls", "ln", "seq"):
        (folder / "bin" / name).symlink_to("busybox")
    (folder / "bin" / "mark").write_text(NAME)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY bin /bin\nENV WHO=image\nWORKDIR /work\n")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if Path(HYBRID).is_dir() and os.getuid() == 0:
            script = f"umount {HYBRID}; echo; exec sleep 3600"
            words = ["unshare", "-m", "sh", "-c", script]
            place = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            stack.callback(place.kill)
            place.stdout.readline()
            (folder / "podman").write_text(f'#!/bin/sh\nexec nsenter -t {place.pid} -m {command} "$@"\n')
            (folder / "podman").chmod(0o755)
            patch.setenv("PATH", str(folder), prepend=os.pathsep)
        words = ["podman", "build", "-q", "-t", NAME, str(folder)]
        limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--network", "none"]
        for step in (words, ["podman", "run", "--rm", *limits, NAME, "/bin/sh", "-c", ":"]):
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"podman runs no container on this machine: {done.stderr[-200:]}")
        yield folder
        subprocess.run(["podman", "rmi", "-f", NAME], capture_output=True)


@pytest.fixture(scope="module")
def boxes(podman):
    pool = Workspaces(image=NAME, engine="podman", memory_bytes=100 << 20, processes=40, count=4)
    yield pool
    pool.close()


@pytest.fixture
def play(boxes):
    """Return play(scenario, pool, sockets): what `scenario(workspace)` returns in a new container."""

    def played(scenario, pool=boxes, sockets=None):
        async def whole():
            workspace = await pool.open(sockets=sockets)
            try:
                return await scenario(workspace)
            finally:
                await workspace.close()

        return asyncio.run(whole())

    return played


def sh(command, **options):
    return lambda workspace: workspace.run(["sh", "-c", command], wall_s=60, **options)


def test_a_saved_build_is_an_image_without_podman(podman, play, _walls, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "Dockerfile").write_text(
        f"FROM {NAME}\nARG WORD=built\nRUN echo $WORD > made; rm /bin/mark\nRUN rm -r /bin/seq; mkdir /bin/seq\n"
    )
    build = ["podman", "build", "-q", "-t", f"{NAME}-built", str(tmp_path)]
    save = ["podman", "save", "-q", "--format", "oci-dir", "-o", str(tmp_path / "layout"), f"{NAME}-built"]
    try:
        for command in (build, save):
            subprocess.run(command, check=True, capture_output=True)
    finally:
        subprocess.run(["podman", "rmi", "-f", f"{NAME}-built"], capture_output=True)
    script = "pwd; echo $WHO; cat made; ls -d /bin/seq/ /bin/mark"
    pool = Workspaces(image=str(tmp_path / "layout"))
    try:
        result = play(sh(script), pool)
    finally:
        pool.close()
    assert result.output == "/work\nimage\nbuilt\nls: /bin/mark: No such file or directory\n/bin/seq/\n"


def test_a_program_has_an_environment_and_a_directory(play):
    scenario = sh("cat; echo $NAME $WHO; pwd; echo last >&2; exit 3", env={"NAME": "a b"})
    result = play(scenario)
    assert (result.code, result.output) == (3, "a b image\n/work\nlast\n")
    assert play(sh("pwd", cwd="/new/place")).output == "/new/place\n"
    assert play(lambda workspace: workspace.run(["no-such-program"], wall_s=60)).code == 127
    assert play(sh("exit 125")).code == 125


def test_files_stay_and_processes_do_not(play):
    async def scenario(workspace):
        await sh("echo 42 > answer; (sleep 500 &); sleep 0.1")(workspace)
        second = await sh("cat answer; ps")(workspace)
        changes = await workspace.changes()
        return second.output, changes, await workspace.read("answer"), await workspace.read("nothing")

    output, changes, answer, nothing = play(scenario)
    assert output.startswith("42\n") and "sleep 500" not in output
    assert "A /work/answer" in changes.splitlines() and (answer, nothing) == (b"42\n", None)


def test_files_of_a_start_are_gone_at_the_next(play, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("hidden")

    async def scenario(workspace):
        await sh("mkdir /tests; echo mine > /tests/planted; ln -s /bin /x")(workspace)
        files = {"/tests": tmp_path / "tests"}
        first = await sh("ls /tests; cat /tests/test.sh", files=files)(workspace)
        await workspace.write("/x/../y/z", b"written")
        return first, await sh("ls -d /tests; cat /y/z")(workspace)

    first, second = play(scenario)
    assert first.output == "test.sh\nhidden"
    assert "/tests: No such" in second.output and second.output.endswith("written")


def test_what_is_not_a_file_reads_as_none(play, tmp_path):
    (tmp_path / "secret").write_text("secret of the host")

    async def scenario(workspace):
        await sh(f"mkdir d; ln -s d l; ln -s {tmp_path}/secret s; ln -s ../../..{tmp_path}/secret t")(
            workspace
        )
        return [await workspace.read(path) for path in ("d", "l", "s", "t", "/proc/1/environ")]

    assert play(scenario)[:4] == [None] * 4


def test_a_timeout_and_a_kill_end_everything(play):
    async def scenario(workspace):
        result = await workspace.run(["sh", "-c", "sleep 77 & echo begun; sleep 77"], wall_s=1)
        program = await workspace.start(["sleep", "77"])
        await program.kill()
        return result, await sh("ps")(workspace)

    result, last = play(scenario)
    assert result.timed_out and result.output == "begun\n" and "sleep 77" not in last.output


def test_programs_of_a_broken_container_have_code_127(play):
    async def scenario(workspace):
        await sh("echo 1 > answer; rm -rf /bin/*")(workspace)
        results = [await sh("echo 2")(workspace) for _ in range(2)]
        return [result.code for result in results], await workspace.read("answer"), await workspace.changes()

    codes, answer, changes = play(scenario)
    assert codes == [127, 127] and answer == b"1\n" and "D /bin/busybox" in changes


SHELL = "busybox rm /bin/sh; printf '#!/bin/busybox sh\\n%s\\n' '{}' > /bin/sh; busybox chmod 755 /bin/sh"
SKIP_RM = 'case "$2" in *"rm -rf"*) {};; esac; exec busybox sh "$@"'
IN_THE_WAY = {
    "shell-that-hangs": SHELL.format("while :; do busybox sleep 1; done"),
    "shell-that-hangs-once": SHELL.format(SKIP_RM.format("while :; do busybox sleep 1; done")),
    "shell-that-ends": SHELL.format("exit 3"),
    "file-in-the-place": f"echo x > /tests; {SHELL.format(SKIP_RM.format('exit 0'))}",
}


@pytest.mark.parametrize("command", IN_THE_WAY.values(), ids=IN_THE_WAY)
@pytest.mark.parametrize("sockets", [None, {8001: "127.0.0.1:9"}], ids=["alone", "with-a-port"])
def test_what_is_in_the_way_of_files_is_a_failure(command, sockets, play, tmp_path, monkeypatch):
    monkeypatch.setitem(containers.WAIT_S, "exec", 5.0)
    (tmp_path / "test.sh").write_text("echo passed")

    async def scenario(workspace):
        await sh(command)(workspace)
        await workspace.run(["busybox", "true"], wall_s=1)  # is not the machine's fault either
        words = ["busybox", "sh", "/tests/test.sh"]
        return await asyncio.wait_for(workspace.run(words, wall_s=5, files={"/tests": tmp_path}), 60)

    result = play(scenario, sockets=sockets)
    assert result.code != 0 and "passed" not in result.output


def test_a_container_stopped_from_outside_gives_no_code(play, tmp_path):
    def stop(workspace):
        subprocess.run(["podman", "kill", workspace._name], check=True, capture_output=True)

    async def before(workspace):
        stop(workspace)
        await sh("echo 1")(workspace)

    async def before_files(workspace):
        stop(workspace)
        await sh("echo 1", files={"/tests": tmp_path})(workspace)

    async def meanwhile(workspace):
        program = await workspace.start(["sh", "-c", "echo begun; sleep 77"])
        await program.stdout.readline()
        stop(workspace)
        await program.wait()

    for scenario in (before, before_files, meanwhile):
        with pytest.raises(WorkspaceError):
            play(scenario)


def test_limits_are_those_of_the_engine(play):
    memory = play(sh("dd if=/dev/zero of=/dev/null bs=200M count=1"))
    assert memory.code == 137
    forks = play(sh("for n in $(seq 100); do sleep 5 & done; wait"))
    assert "fork" in forks.output


def test_what_programs_print_is_stored_nowhere(play):
    async def scenario(workspace):
        await sh("dd if=/dev/zero of=/proc/1/fd/1 bs=1M count=4")(workspace)
        words = ["podman", "logs", workspace._name]
        return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout

    assert play(scenario) == b""


def test_a_port_reaches_its_address_and_no_other(play):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        with (
            socket.create_server(path, family=socket.AF_UNIX) as server,
            socket.create_server(("127.0.0.1", 0)) as host,
        ):
            other = host.getsockname()[1]

            def serve(server):
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    connection.sendall(connection.recv(100).upper())
                    connection.close()

            for listener in (server, host):
                threading.Thread(target=serve, args=(listener,), daemon=True).start()

            async def scenario(workspace):
                command = f"echo hello | nc 127.0.0.1 8001; echo hello | nc 127.0.0.1 {other} 2>/dev/null || echo closed"
                return [(await sh(command)(workspace)).output for _ in range(2)]

            outputs = play(scenario, sockets={8001: path})
    assert all(output.startswith("HELLO\n") and output.endswith("closed\n") for output in outputs), outputs


def test_a_directory_with_a_dockerfile_is_built_by_the_engine(play, podman):
    pool = Workspaces(image=str(podman), engine="podman")
    assert play(sh("echo $WHO"), pool=pool).output == "image\n"
    pool.close()


def test_an_image_that_is_missing_is_the_machines_fault(podman):
    pool = Workspaces(image="localhost/rl4llm-test-no-such-image", engine="podman")
    with pytest.raises(WorkspaceError):
        asyncio.run(pool.open())
    pool.close()


DIES = """
import asyncio, sys
from rl4llm.extensions.workspaces import Workspaces
async def main():
    pool = Workspaces(image=sys.argv[1], engine="podman")
    for _ in range(2):
        workspace = await pool.open()
        await workspace.start(["sleep", "500"])
        print(workspace._name, pool._keeper._process.pid, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["trainer", "keeper and trainer"])
def test_no_container_is_left_of_a_killed_trainer(play, victim):
    def names():
        done = subprocess.run(
            ["podman", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True
        )
        return done.stdout.split()

    command = [sys.executable, "-c", DIES, NAME]
    environ = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as trainer:
        opened = [trainer.stdout.readline().split() for _ in range(2)]
        assert {name for name, _ in opened} <= set(names())
        if victim != "trainer":
            os.kill(int(opened[0][1]), 9)
        trainer.kill()
    if victim != "trainer":  # they go with the next pool of podman
        pool_module._sweep("bwrap")
        pool = Workspaces(image=NAME, engine="podman")
        play(sh(":"), pool=pool)
        pool.close()
    deadline = time.monotonic() + 60
    while {name for name, _ in opened} & set(names()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not {name for name, _ in opened} & set(names())


@pytest.mark.parametrize("failing", ["ps", "rm"])
def test_a_directory_stays_while_its_containers_do(failing, tmp_path, monkeypatch):
    (tmp_path / "podman").write_text(f'#!/bin/sh\necho name\ntest "$1" != {failing}\n')
    (tmp_path / "podman").chmod(0o755)
    base = tmp_path / f"{pool_module.PREFIX}podman-x"
    base.mkdir()
    (base / "lock").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool_module._sweep("podman")
    assert base.exists()
    (tmp_path / "podman").write_text("#!/bin/sh\n")
    pool_module._sweep("podman")
    assert not base.exists()


def test_a_link_in_an_archive_reads_as_none(tmp_path):
    (tmp_path / "link").symlink_to("target")
    subprocess.run(["tar", "-cf", "archive", "link"], cwd=tmp_path, check=True)
    assert containers._first_file(["cat", str(tmp_path / "archive")], 10) is None
