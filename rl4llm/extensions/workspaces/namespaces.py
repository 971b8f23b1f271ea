"""User and mount namespaces without privileges, by the kernel's own calls."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

NEWNS, NEWNET, NEWUSER = 0x00020000, 0x40000000, 0x10000000
BIND, RECURSIVE, SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
SIOCSIFFLAGS, INTERFACE_UP = 0x8914, 0x1
ALLOWING = (
    "sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 allows them"
)
USER = 1_900_000_000  # above the uids that user databases and container runtimes assign
_LIBC = ctypes.CDLL(None, use_errno=True)


def workspace_user(uid_map: str | None = None) -> int:
    """Return the host's uid of files and processes of workspaces: an unassigned one where this process may choose it.

    `uid_map` is the text of /proc/self/uid_map. The kernel does not limit the processes of uid 0.
    """
    if os.getuid() != 0:
        return os.getuid()
    lines = (uid_map or Path("/proc/self/uid_map").read_text()).splitlines()
    start, _, count = max(tuple(map(int, line.split())) for line in lines)
    return USER if start <= USER < start + count else start + count - 1


def enter() -> int:
    """Fork a process into a new user and mount namespace; return 0 in it, and its pid in the caller.

    In the new process the user is the old one, whose directories it may enter, until `become_root`. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        if _LIBC.unshare(NEWUSER | NEWNS) != 0:
            theirs.send(os.strerror(ctypes.get_errno()).encode())
            os._exit(1)
        theirs.send(b"+")
        if not theirs.recv(1):
            os._exit(1)
        theirs.close()
        return 0
    theirs.close()
    with ours:
        if (word := ours.recv(1000)) != b"+":
            os.waitpid(pid, 0)
            raise OSError(f"user namespaces are not allowed ({word.decode()}): {ALLOWING}")
        user = workspace_user()
        Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/uid_map").write_text(f"0 {user} 1")
        Path(f"/proc/{pid}/gid_map").write_text(f"0 {user if os.getuid() == 0 else os.getgid()} 1")
        ours.send(b"+")
    return pid


def become_root() -> None:
    """Become root of the user namespace, which outside it is an ordinary user."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    prctl(PR_SET_DUMPABLE, 1)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount a file system. Raises OSError with the target."""
    words = [source.encode(), target.encode(), kind.encode() if kind else None]
    _checked(_LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {kind or ''} on {target}")


def new_network() -> None:
    """Enter a network namespace whose only interface is loopback, with small buffers for its connections."""
    _checked(_LIBC.unshare(NEWNET), "unshare the network")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", INTERFACE_UP))
    for name in ("tcp_rmem", "tcp_wmem"):
        with suppress(OSError):
            Path(f"/proc/sys/net/ipv4/{name}").write_text("4096 16384 65536")


def join_network(pid: int) -> None:
    """Enter the network of a process, through its user namespace unless this process is root. Raises OSError."""
    for kind, flag in (("user", NEWUSER), ("net", NEWNET)):
        if kind == "net" or os.getuid() != 0:
            with open(f"/proc/{pid}/ns/{kind}") as namespace:
                _checked(_LIBC.setns(namespace.fileno(), flag), f"enter the {kind} namespace of {pid}")


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Credentials must not change afterwards."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
