"""The system calls that an isolated program is refused, as a filter in classic BPF.

Namespaces already isolate the objects of most of them. The filter also blocks the kernel's code, and the ways to hold
memory that no limit counts. Numbers are those of Linux for x86-64 and arm64; other processors have no filter.
"""

from __future__ import annotations

import errno
import platform
import struct

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 24, 32, 40
NEW_NAMESPACES = 0x7E020000  # the CLONE_NEW* flags of clone
X32 = 0x40000000
TIOCSTI = 0x5412
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
F_SETPIPE_SZ = 1031
SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = 1, 7, 8
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

# name: number on x86-64, on arm64; None where there is no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116), "personality": (135, 92),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "vhangup": (153, 58), "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
# What changes a user or owner does nothing where there is one user, and programs that install software expect success.
ONE_USER = {
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setgroups": (116, 159),
    "setresuid": (117, 147), "setresgid": (119, 149),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
CLONE, CLONE3, SOCKET, SOCKETPAIR, SETSOCKOPT = (56, 220), (435, 435), (41, 198), (53, 199), (54, 208)
IOCTL, MMAP, FCNTL = (16, 29), (9, 222), (72, 25)


def seccomp_filter(
    machine: str | None = None, *, loopback: bool = False, one_user: bool = False
) -> bytes | None:
    """Return the filter for a processor, by default this one; None if its system call numbers are unknown.

    With `loopback` it allows Internet sockets, whose buffers are taken from the whole machine's memory. With `one_user`
    the calls that change a user or an owner do nothing and succeed.
    """
    if (machine or platform.machine()) not in ARCHITECTURES:
        return None
    column, audit = ARCHITECTURES[machine or platform.machine()]
    refuse = _op(RETURN, ERRNO | errno.EPERM)
    program = [_op(LOAD, ARCHITECTURE), _op(EQUAL, audit, 1, 0), _op(RETURN, KILL), _op(LOAD, NUMBER)]
    if column == 0:
        program += [_op(AT_LEAST, X32, 0, 1), refuse]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [_op(EQUAL, number, 0, 1), refuse]
    for numbers in ONE_USER.values() if one_user else ():
        if (number := numbers[column]) is not None:
            program += [_op(EQUAL, number, 0, 1), _op(RETURN, ERRNO)]
    # Without clone3 libc uses clone, whose flags a filter can read.
    program += [_op(EQUAL, CLONE3[column], 0, 1), _op(RETURN, ERRNO | errno.ENOSYS)]
    program += _when(CLONE[column], [_op(LOAD, FIRST_ARGUMENT), _op(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse])
    program += _when(IOCTL[column], [_op(LOAD, SECOND_ARGUMENT), _op(EQUAL, TIOCSTI, 0, 1), refuse])
    # Shared memory without a file stays when most of its mapping is removed, so no limit of a process counts it.
    anonymous = [_op(ANY_BIT, MAP_ANONYMOUS, 0, 2), _op(ANY_BIT, MAP_SHARED, 0, 1), refuse]
    program += _when(MMAP[column], [_op(LOAD, FOURTH_ARGUMENT), *anonymous])
    program += _when(FCNTL[column], [_op(LOAD, SECOND_ARGUMENT), _op(EQUAL, F_SETPIPE_SZ, 0, 1), refuse])
    of_sockets = [_op(LOAD, SECOND_ARGUMENT), _op(EQUAL, SOL_SOCKET, 0, 4)]
    holds_more = [_op(EQUAL, SO_SNDBUF, 1, 0), _op(EQUAL, SO_RCVBUF, 0, 1), refuse]
    program += _when(SETSOCKOPT[column], [*of_sockets, _op(LOAD, THIRD_ARGUMENT), *holds_more])
    no_family = _op(RETURN, ERRNO | errno.EAFNOSUPPORT)
    families = (AF_UNIX, AF_INET, AF_INET6) if loopback else (AF_UNIX,)
    allowed = [_op(EQUAL, family, len(families) - position, 0) for position, family in enumerate(families)]
    for call in (SOCKET, SOCKETPAIR):
        program += _when(call[column], [_op(LOAD, FIRST_ARGUMENT), *allowed, no_family])
    return b"".join([*program, _op(RETURN, ALLOW)])


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """Return the block for one system call; it allows what it does not refuse."""
    return [_op(EQUAL, number, 0, len(block) + 1), *block, _op(RETURN, ALLOW)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
