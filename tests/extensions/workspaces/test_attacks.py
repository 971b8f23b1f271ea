"""What programs of a policy try against the host, other workspaces, limits and the next start, each one really tried."""

import asyncio
import os
import socket
import subprocess
import time

import psutil
import pytest
from attacks import ATTACKS, END, PRELUDE

PYTHON = "/usr/bin/python3"
SECRET = "the-secret-of-the-host"
pytestmark = pytest.mark.skipif(not os.path.exists(PYTHON), reason="/usr has no Python for the attacks")


def hyphened(name):
    """Return an id without spaces."""
    return name.replace(" ", "-")


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What is outside: a readable secret, a listening port, an abstract socket, a process."""
    directory = tmp_path_factory.mktemp("outside")
    for path in (directory, *directory.parents[:-2]):
        path.chmod(0o755)
    secret = directory / "secret.txt"
    secret.write_text(SECRET)
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0rl4llm-attack-" + str(os.getpid()))
        abstract.listen()
        addresses = [
            entry.address
            for entries in psutil.net_if_addrs().values()
            for entry in entries
            if entry.family == socket.AF_INET
        ]
        yield {
            "secret": str(secret), "pid": os.getpid(), "port": server.getsockname()[1], "other": "of-another-workspace",
            "abstract": f"rl4llm-attack-{os.getpid()}", "addresses": addresses,
        }  # fmt: skip


def filled(code, outside):
    for name, value in outside.items():
        code = code.replace("{" + name + "!r}", repr(value))
    return code


@pytest.mark.parametrize("name", ATTACKS, ids=hyphened)
def test_an_attack_does_not_work(name, play, outside):
    async def attacked(workspace):
        code = filled(PRELUDE + ATTACKS[name] + END, outside)
        return await workspace.run([PYTHON, "-c", code], wall_s=60)

    async def beside_another(workspace):
        await workspace.write("/root/of-another-workspace", b"x")
        return await asyncio.to_thread(play, attacked)

    result = play(beside_another)
    assert "tried held" in result.output, result
    assert SECRET not in result.output


@pytest.mark.parametrize(
    "name", ["reads a file by its path", "reaches a port of the host", "sees another interface"]
)
def test_an_attack_works_where_there_are_no_walls(name, outside, tmp_path):
    """The table is not blind: on the bare machine these work."""
    code = filled(PRELUDE + ATTACKS[name] + END, outside)
    done = subprocess.run([PYTHON, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "tried BROKEN" in done.stdout, done.stderr


BOMBS = {
    "memory": "x = []\nwhile True: x.append(bytearray(8 << 20))",
    "memory of many processes": """
import os, time
for _ in range(4): os.fork()
x = bytearray(b'x') * (20 << 20)
time.sleep(60)""",
    "memory behind a main thread that ended": """
import ctypes, threading, time
def hog():
    time.sleep(0.3)
    x = []
    while True: x.append(bytearray(b'x') * (8 << 20))
threading.Thread(target=hog).start()
ctypes.CDLL(None).syscall(60, 0)""",
    "memory of page tables": """
import mmap, time
m = mmap.mmap(-1, 200 << 30, 0x4022, mmap.PROT_READ)
for place in range(0, len(m), 2 << 20): m[place]
time.sleep(60)""",
    "memory of empty files": "n = 0\nwhile True:\n n += 1\n open(f'/dev/shm/{n}', 'w')",
    "memory of sockets beside a zombie": """
import os, socket, time
os.fork() or os._exit(0)
listener, pairs = socket.create_server(('127.0.0.1', 0)), []
for _ in range(1000):
    pairs += [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for end in pairs[-2:]:
        end.setblocking(False)
        try:
            while True: end.send(bytes(1 << 16))
        except BlockingIOError: pass
time.sleep(60)""",
    "disk": "n = 0\nwhile True:\n n += 1\n open(f'f{n}', 'wb').write(bytes(4 << 20))",
    "disk in deleted files": """
import os, time
n = 0
while True:
    n += 1; f = open(f'f{n}', 'wb'); f.write(bytes(4 << 20)); f.flush(); os.remove(f'f{n}'); globals()[f'k{n}'] = f""",
    "disk in deleted files of a thread": """
import ctypes, os, threading, time
def hog():
    time.sleep(0.3)
    n, x = 0, []
    while True: n += 1; x.append(open('f', 'wb')); x[-1].write(bytes(4 << 20)); x[-1].flush(); os.remove('f')
threading.Thread(target=hog).start()
ctypes.CDLL(None).syscall(60, 0)""",
    "disk in deleted files that are mapped": """
import mmap, os
x = []
while True:
    with open('f', 'w+b') as f: f.write(bytes(4 << 20)); f.flush(); x.append(mmap.mmap(f.fileno(), 4 << 20))
    os.remove('f')
    os.closerange(3, 1000)""",
    "many empty files": "n = 0\nwhile True:\n n += 1\n open(f'f{n}', 'wb')",
}


@pytest.mark.parametrize("name", BOMBS, ids=hyphened)
def test_a_bomb_ends_with_the_limit_that_it_hit(name, play):
    result = play(lambda workspace: workspace.run([PYTHON, "-c", BOMBS[name]], wall_s=50))
    assert result.code == 137 and not result.timed_out, result
    assert f"of {'memory' if 'memory' in name else 'the disk'}]" in result.output, result


def test_deep_directories_end_with_the_workspace(play):
    code = "import os\nwhile True: os.mkdir('d'); os.chdir('d')"

    async def scenario(workspace):
        await workspace.run([PYTHON, "-c", code], wall_s=3)
        return await workspace.changes(), await workspace.run(["echo", "alive"], wall_s=30)

    changes, last = play(scenario)
    assert "too deep" in changes and last.output == "alive\n"


def test_a_sparse_file_ends_at_the_limit(play):
    code = "f = open('f', 'wb'); f.truncate(1 << 40)"
    result = play(lambda workspace: workspace.run([PYTHON, "-c", code], wall_s=50))
    assert result.code != 0 and "too large" in result.output.lower(), result


def test_a_fork_bomb_stays_below_the_limit_and_ends(play):
    code = """
import os, time
made = 0
for _ in range(500):
    try:
        if os.fork() == 0: time.sleep(600)
        made += 1
    except OSError: break
print('made', made)"""

    async def twice(workspace):
        first = await workspace.run([PYTHON, "-c", code], wall_s=50)
        bomb = await workspace.run(["sh", "-c", "f() { f | f & }; f; sleep 0.5"], wall_s=20)
        return first, bomb, await workspace.run(["echo", "alive"], wall_s=30)

    first, _, last = play(twice)
    assert 10 < int(first.output.split()[-1]) <= 48
    assert last.output == "alive\n"


def test_a_flood_of_output_is_bounded(play):
    result = play(
        lambda workspace: workspace.run(
            ["sh", "-c", "echo first; yes | head -c 50000000; echo last"], wall_s=50
        )
    )
    assert "bytes cut" in result.output and len(result.output) < (1 << 16) + 100
    assert result.output.startswith("first") and result.output.endswith("last\n")


def test_no_process_survives_its_start(play):
    escape = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            try: print(open('/tests/hidden').read(), file=open('/root/seen', 'a'), flush=True)
            except OSError: pass
            time.sleep(0.001)
    os._exit(0)
"""

    async def scenario(workspace):
        await workspace.run([PYTHON, "-c", escape], wall_s=20)
        program = await workspace.start(
            [PYTHON, "-c", escape + "time.sleep(600)"]
        )  # also one that does not end
        await asyncio.sleep(0.3)
        hidden = os.path.abspath(__file__)
        result = await workspace.run(
            ["sh", "-c", "sleep 0.3; ls /proc | grep -c '^[0-9]'"], wall_s=20, files={"/tests/hidden": hidden}
        )
        assert await program.wait() == 137
        return result, await workspace.read("/root/seen")

    result, seen = play(scenario)
    assert int(result.output) <= 5 and seen is None


def test_hidden_tests_are_read_only_and_gone_afterwards(play, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("hidden")
    command = (
        "echo x >> /tests/test_x.py || echo refused; rm -rf /tests; mv /tests /other; cat /tests/test_x.py"
    )

    async def scenario(workspace):
        files = {"/tests": tmp_path / "tests"}
        first = await workspace.run(["sh", "-c", command], wall_s=20, files=files)
        return first, await workspace.run(
            ["sh", "-c", "ls -A / /tests; find / -name test_x.py -xdev"], wall_s=20
        )

    first, second = play(scenario)
    assert "refused" in first.output and first.output.endswith("hidden")
    assert "test_x" not in second.output and (tmp_path / "tests" / "test_x.py").read_text() == "hidden"


LOADERS = {
    "the loader's list": "echo /root/x.so > /etc/ld.so.preload",
    "the configuration of a library": "mkdir -p /etc/ssl; echo x > /etc/ssl/openssl.cnf",
    "Python's modules of the machine": "mkdir -p /etc/python3.11; echo x > /etc/python3.11/sitecustomize.py",
    "the directory of configurations": "mv /etc /etc2 && mkdir /etc",
    "libraries": "mv /lib /lib2",
    "the loader": "mv /lib64 /lib642",
    "programs": "rm /bin; mkdir /bin/x",
}


@pytest.mark.parametrize("name", LOADERS, ids=hyphened)
def test_what_loads_the_programs_of_the_host_stays(name, play):
    """Otherwise programs of the next start, such as tests, would run code of the policy."""

    async def scenario(workspace):
        tried = await workspace.run(["sh", "-c", f"({LOADERS[name]}) && echo BROKEN"], wall_s=20)
        return tried, await workspace.run(["ls", "/etc"], wall_s=20)

    tried, after = play(scenario)
    assert tried.code != 0 and "BROKEN" not in tried.output
    assert after.code == 0 and "ld.so.preload" not in after.output


IN_THE_WAY = {
    "a file": "echo x > /tests",
    "a link to the host": "mkdir -p /oldroot/tmp; ln -s /oldroot/tmp /tests",
    "a link to another place": "mkdir /root/trap; ln -s /root/trap /tests",
    "a loop": "ln -s /tests /tests",
    "a fifo": "mkfifo /tests",
    "a full directory": "mkdir -p /tests/hidden.py/deep; chmod 0 /tests",
    "a dangling link": "ln -s /nothing/at/all /tests",
    "a link for the place of the working directory": "cd /; rm -rf /root; ln -s /oldroot/root /root",
    "a file for the machine's files": "rm -rf /etc; echo x > /etc",
    "a link for the machine's files": "mv /etc /etc2; ln -s /oldroot/etc /etc",
}


@pytest.mark.parametrize("name", IN_THE_WAY, ids=hyphened)
def test_what_is_in_the_way_of_tests_does_not_help(name, play):
    async def scenario(workspace):
        await workspace.run(["sh", "-c", IN_THE_WAY[name]], wall_s=20)
        files = {"/tests/hidden.py": os.path.abspath(__file__)}
        return await workspace.run(["cat", "/tests/hidden.py"], wall_s=20, files=files)

    result = play(scenario)
    assert result.code == 0 and "What programs of a policy try" in result.output, result


UNREADABLE = {
    "a fifo": "mkfifo x",
    "a directory": "mkdir x",
    "a device": "ln -s /dev/zero x",
    "a socket": f"{PYTHON} -c \"import socket; socket.socket(socket.AF_UNIX).bind('x')\"",
    "a link to the host": "ln -s {secret} x",
    "a climb": "ln -s ../../../../../../../..{secret} x",
    "a process of the host": "ln -s /proc/1/environ x",
    "a loop": "ln -s x x",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_reading_what_is_not_a_file_gives_none(name, play, outside):
    async def scenario(workspace):
        await workspace.run(["sh", "-c", UNREADABLE[name].replace("{secret}", outside["secret"])], wall_s=20)
        return await workspace.read("x")

    began = time.monotonic()
    assert play(scenario) is None
    assert time.monotonic() - began < 30


def test_a_huge_file_is_read_up_to_the_limit(play):
    async def scenario(workspace):
        await workspace.run(["sh", "-c", "truncate -s 60M x; mkdir d; ln -s /root/x d/y"], wall_s=20)
        return await workspace.read("d/y", limit=1000)

    assert play(scenario) == bytes(1000)


def test_writing_replaces_a_link_and_stays_inside(play, outside):
    async def scenario(workspace):
        await workspace.run(["sh", "-c", f"ln -s {outside['secret']} x; ln -s / up"], wall_s=20)
        await workspace.write("x", b"mine")
        await workspace.write(f"up{outside['secret']}", b"mine")
        return await workspace.read("x"), await workspace.read(outside["secret"])

    assert play(scenario) == (b"mine", b"mine")
    with open(outside["secret"]) as file:
        assert file.read() == SECRET


ODD = """
import os
open('binary', 'wb').write(bytes(range(256)) * 10)
open('long', 'w').write('x\\n' * 1000000)
open('new\\nline', 'w').write('text\\n')
open(b'\\xff\\xfe', 'w').write('text\\n')
open('\\x1b[31mred', 'w').write('text\\n')
os.mkfifo('fifo'); os.symlink('/etc/shadow', 'link'); os.mkdir('locked', 0)
os.chdir('/root')
for n in range(200):
    os.mkdir('deep' * 50); os.chdir('deep' * 50)
"""


def test_changes_show_odd_files_within_a_bound(play):
    async def scenario(workspace):
        await workspace.run([PYTHON, "-c", ODD], wall_s=20)
        return await workspace.changes(limit=5000)

    text = play(scenario)
    assert len(text) < 5200
    assert "root/binary differ" in text and "root/long differ" in text and "'root/new\\nline'" in text
    assert "\x1b" not in text and "link: nothing became a link to /etc/shadow" in text
    assert "root:" not in text


def test_changes_that_take_long_to_compare_are_cut(play, image):
    lines = [f"line {n % 104}" for n in range(3000)]  # no line is so frequent that difflib leaves it out

    async def scenario(workspace):
        await workspace.write("/data/lines", "\n".join(lines[::-1]).encode())
        return await workspace.changes()

    (image / "data" / "lines").write_text("\n".join(lines[k % 3000] for k in range(0, 3000 * 7, 7)))
    began = time.monotonic()
    text = play(scenario, image=str(image))
    assert "takes too long" in text or "b/data/lines" in text
    assert time.monotonic() - began < 60


def test_changes_are_a_diff_of_the_image(play, tmp_path, image):
    async def scenario(workspace):
        await workspace.run(
            ["sh", "-c", "echo new > /data/kept; rm /data/removed; mv /data/moved /data/there"], wall_s=20
        )
        return await workspace.changes()

    text = play(scenario, image=str(image))
    assert "--- a/data/kept\n+++ b/data/kept\n@@ -1 +1 @@\n-old\n+new\n" in text
    assert "--- a/data/removed\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n" in text
    assert "+++ b/data/there" in text and "proc" not in text
