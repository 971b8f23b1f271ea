"""A Python that others start, such as `torchrun` its ranks, without the seconds that the imports of torch take.

    environ = {**os.environ, "PYTHON_EXEC": warm_python}                       # the fixture of conftest.py
    subprocess.run(["torchrun", "-m", "rl4llm", "train", "config.yaml"], env=environ)

The program runs in a fork of a process that has imported torch and transformers. What was started in its place is a small
process that passes signals on and ends as the program ends; when it is killed, so is the program. Only `-m MODULE` and a
file run like this. The program has the network and the files of the process that started it. `warm_of` does the same for the
Python of another environment, which runs this file.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

from forked_python import become, forks

STAND_IN = """#!{python} -SE
import json, os, signal, socket, sys
words = sys.argv[1 + (sys.argv[1:2] == ["-u"]) :]
server = socket.socket(socket.AF_UNIX)
if words[:1] not in {forked} and words[0].startswith("-") or server.connect_ex({address!r}):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
server.sendall(asked)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
code = int(server.recv(8) or -signal.SIGKILL)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextlib.contextmanager
def warm(directory):
    """Yield the path of a Python; what still runs of its programs is killed in the end."""
    # with -P runs what looks for its parent
    address, stand_in = _stand_in(directory, sys.executable, [["-m"]])
    listens, ready = forks().Pipe(duplex=False)
    process = forks().Process(target=_serve_children, args=(address, stand_in, ready))
    process.start()
    listens.recv_bytes()
    try:
        yield stand_in
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def warm_of(python, directory, *imported):
    """Yield the path of a Python whose programs start in the environment of `python` with some modules imported."""
    address, stand_in = _stand_in(directory, python, [["-m"], ["-P"]])
    command = [python, __file__, address, *imported]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1), f"{python} cannot import {imported}"
        try:
            yield stand_in
        finally:
            process.terminate()


def _stand_in(directory, python, forked):
    """Return the address of a server, and the path of a program that asks it to run others that begin with `forked`."""
    address, stand_in = Path(directory, "warm.socket"), Path(directory, "python")
    stand_in.write_text(STAND_IN.format(python=python, address=str(address), forked=forked))
    stand_in.chmod(0o755)
    return str(address), str(stand_in)


def _serve_children(address, stand_in, ready):
    sys.executable = stand_in  # programs start others with it
    _serve(address, lambda: ready.send_bytes(b""), parent_process().sentinel)


def _serve(address, ready, parent):
    """Start what stand-ins ask for, until the tests end, when `parent` can be read."""
    sys.stdout.reconfigure(write_through=True)
    listener, selector = socket.socket(socket.AF_UNIX), selectors.DefaultSelector()
    listener.bind(address)
    listener.listen()
    selector.register(listener, selectors.EVENT_READ, lambda: _start(listener, selector))
    selector.register(parent, selectors.EVENT_READ, sys.exit)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    ready()
    try:
        while True:
            for key, _ in selector.select():
                if selector.get_map().get(key.fd) is key:  # no other event of this round has ended it
                    key.data()
    finally:
        for process in active_children():
            process.kill()


def _start(listener, selector):
    connection, _ = listener.accept()
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    length = int.from_bytes(header, "big")
    words, cwd, environ = json.loads(connection.recv(length, socket.MSG_WAITALL))
    pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    process = get_context("fork").Process(target=_program, args=(pid, words, cwd, environ, *descriptors))
    process.start()
    for descriptor in descriptors:
        os.close(descriptor)

    def ended():
        process.join()
        selector.unregister(process.sentinel)
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(str(process.exitcode).encode())
        connection.close()

    def told():
        number = connection.recv(1)
        os.kill(process.pid, number[0] if number else signal.SIGKILL)
        if not number:
            selector.unregister(connection)

    selector.register(process.sentinel, selectors.EVENT_READ, ended)
    selector.register(connection, selectors.EVENT_READ, told)


def _program(pid, words, cwd, environ, *descriptors):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    _enter_namespaces(pid)
    become(words, cwd, environ, *descriptors)


def _enter_namespaces(pid):
    """Have this process see the network and the files that another process sees."""
    kinds = [
        kind
        for kind in ("net", "mnt")
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    ]
    for descriptor in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    _serve(sys.argv[1], lambda: os.write(1, b"."), sys.stdin.fileno())
