"""The filter of system calls, run by an interpreter of its instructions, for both processors that it knows."""

import errno
import struct

import pytest

from rl4llm.runtime.seccomp import ALLOW, ERRNO, KILL, ONE_USER, REFUSED, seccomp_filter

PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
REFUSAL = ERRNO | errno.EPERM


def verdict(machine, number, *arguments, audit=None, loopback=False, one_user=False):
    """What the kernel would do with a system call."""
    data = struct.pack(
        "<IIQ6Q", number, audit or PROCESSORS[machine][1], 0, *arguments, *[0] * (6 - len(arguments))
    )
    program = list(struct.iter_unpack("HBBI", seccomp_filter(machine, loopback=loopback, one_user=one_user)))
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
            code
        ]
        position += if_true if holds else if_false


@pytest.mark.parametrize("machine", PROCESSORS)
def test_seccomp_refuses_exactly_the_listed_calls(machine):
    column = PROCESSORS[machine][0]
    refused = {numbers[column] for numbers in REFUSED.values()} - {None}
    assert len(refused) > 50
    special = {(56, 220)[column], 435, (41, 198)[column], (16, 29)[column], (9, 222)[column]}
    special |= {(72, 25)[column], (54, 208)[column], (53, 199)[column]}
    for number in set(range(500)) - special:
        assert verdict(machine, number) == (REFUSAL if number in refused else ALLOW), number


@pytest.mark.parametrize("machine", PROCESSORS)
def test_seccomp_checks_arguments_of_calls_that_programs_need(machine):
    column = PROCESSORS[machine][0]
    clone, socket, ioctl, mmap = (56, 220)[column], (41, 198)[column], (16, 29)[column], (9, 222)[column]
    assert verdict(machine, clone, 0x01200011) == ALLOW
    assert verdict(machine, 435) == ERRNO | errno.ENOSYS
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, flag | 17) == REFUSAL
    assert verdict(machine, socket, 1) == ALLOW
    assert {verdict(machine, socket, family) for family in (0, 2, 3, 10, 16, 17, 38, 40)} == {
        ERRNO | errno.EAFNOSUPPORT
    }
    socketpair = (53, 199)[column]
    assert [verdict(machine, socketpair, family) for family in (1, 30)] == [ALLOW, ERRNO | errno.EAFNOSUPPORT]
    fcntl, setsockopt = (72, 25)[column], (54, 208)[column]
    assert [verdict(machine, setsockopt, 3, *option) for option in ((1, 6), (1, 7), (6, 7))] == [
        ALLOW,
        REFUSAL,
        ALLOW,
    ]
    assert [verdict(machine, fcntl, 3, command) for command in (1030, 1031, 1032)] == [ALLOW, REFUSAL, ALLOW]
    assert {verdict(machine, mmap, 0, 0, 3, flags) for flags in (0x02, 0x22, 0x01, 0x03)} == {ALLOW}
    assert {verdict(machine, mmap, 0, 0, 3, flags) for flags in (0x21, 0x23)} == {REFUSAL}
    assert verdict(machine, ioctl, 0, 0x5412) == REFUSAL
    assert verdict(machine, ioctl, 0, 0x5413) == ALLOW


@pytest.mark.parametrize("machine", PROCESSORS)
def test_loopback_allows_the_families_of_the_internet_alone(machine):
    number = (41, 198)[PROCESSORS[machine][0]]
    verdicts = {
        family: verdict(machine, number, family, loopback=True) for family in (0, 1, 2, 3, 10, 16, 17, 38, 40)
    }
    assert {family for family, each in verdicts.items() if each == ALLOW} == {1, 2, 10}
    assert {verdicts[family] for family in (0, 3, 16, 17, 38, 40)} == {ERRNO | errno.EAFNOSUPPORT}


def test_seccomp_refuses_calls_of_other_architectures():
    assert verdict("x86_64", 0, audit=0x40000003) == KILL
    assert verdict("x86_64", 0x40000000 | 59) == REFUSAL
    assert seccomp_filter("riscv64") is None


@pytest.mark.parametrize("machine", PROCESSORS)
def test_changes_of_users_do_nothing_where_there_is_one(machine):
    for numbers in ONE_USER.values():
        if (number := numbers[PROCESSORS[machine][0]]) is not None:
            assert verdict(machine, number) == ALLOW
            assert verdict(machine, number, one_user=True) == ERRNO  # with the error 0
