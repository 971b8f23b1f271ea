"""Programs that run elsewhere: in another container, here one of bubblewrap's, beside the process that judges them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from abuse import ATTACKS
from check_abuse import run_all

from rl4llm.core.errors import ConfigError, SandboxError
from rl4llm.extensions.sandbox import Asserts, Call, Calls, Limits, Program, Sandbox
from rl4llm.extensions.sandbox.levels import find_bwrap, slot_uids

ROOT = Path(__file__).parents[3]
LIMITS = Limits(wall_s=5.0, total_s=10.0)


class Container:
    """A machine made for programs: the system's files read-only, its own directories, no network and no other process."""

    walls = ("--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent")
    made = ()

    def __init__(self):
        bound = ("/usr", "/etc", sys.base_prefix, sys.prefix, ROOT)
        system = [f"--ro-bind {path} {path}" for path in bound]
        links = [f"--symlink usr{path} {path}" for path in ("/bin", "/lib", "/lib64")]
        files = ["--tmpfs /tmp", *system, *links, "--proc /proc --dev /dev", f"--chdir {ROOT}"]
        command = [sys.executable, "-m", "rl4llm.extensions.sandbox.serve"]
        words = [find_bwrap(), *" ".join(files).split(), *self.walls, *command]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.output = self._process.stdout
        self.made.append(self)

    def send(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self):
        self._process.kill()
        self._process.wait()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)


class Open(Container):
    """The same, with this machine's network and processes."""

    walls = ("--die-with-parent",)


@pytest.fixture
def remote(monkeypatch):
    """remote(name): a sandbox in containers of that class, which a configuration names."""
    if find_bwrap() is None or slot_uids(1) == [None]:
        pytest.skip("needs bubblewrap, and root with users to give")
    Container.made = Open.made = []
    monkeypatch.setitem(sys.modules, "containers_of_tests", sys.modules[__name__])
    made = []

    def make(name, **options):
        made.append(Sandbox(f"containers_of_tests:{name}", limits=LIMITS, slots=1, **options))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


def test_remote_programs_are_judged_and_canary_is_contained(remote):
    sandbox = remote("Container")
    double = Program(
        "def double(x):\n    return 2 * x", Calls((Call("double", (4,), 8), Call("double", ("a",), "aa")))
    )
    right = sandbox.run(double)
    assert (right.status, right.passed_share, right.level) == ("ok", 1.0, "remote")
    assert sandbox.active.level == "remote"
    assert sandbox.active.properties["network"] and sandbox.active.properties["host_files"]
    wrong = sandbox.run(Program("def double(x):\n    return x", double.tests))
    assert (wrong.status, wrong.passed_share) == ("wrong", 0.0)
    assert sandbox.run(Program("print(6 * 7)")).stdout == "42\n"
    assert sandbox.run(Program("while True: pass"), Limits(wall_s=0.5, total_s=1.0)).status == "model_error"
    assert sandbox.run(Program("def f(:")).status == "model_error"
    tests = Asserts(("assert double(3) == 6",))
    assert (
        sandbox.run(Program("import os; os._exit(0)\ndef double(x): return 6", tests)).status == "model_error"
    )
    assert len(Container.made) == 1


def test_a_program_reads_nothing_of_the_process_that_judges_it(remote):
    look = (
        "import os\nfound = []\nfor name in os.listdir('/proc'):\n"
        "    if name.isdecimal() and int(name) != os.getpid():\n"
        "        for what in ('mem', 'fd', 'environ'):\n"
        "            try:\n                (os.listdir if what == 'fd' else open)(f'/proc/{name}/{what}')\n"
        "                if os.stat(f'/proc/{name}').st_uid != os.getuid(): found.append(what)\n"
        "            except OSError: pass\nprint(os.getuid(), found)"
    )
    outcome = remote("Container").run(Program(look))
    uid, found = outcome.stdout.split(maxsplit=1)
    assert int(uid) != 0
    assert found.strip() == "[]"


def test_a_container_that_shows_this_machine_is_refused(remote):
    with pytest.raises(SandboxError, match="network"):
        remote("Open").probe()


def test_attacks_stay_inside_the_container(remote):
    remote("Container")  # and is named by the configuration from here on
    chosen = [attack for attack in ATTACKS if attack.kind != "script"][::12]
    assert len(chosen) > 10
    results = run_all(chosen, level="containers_of_tests:Container", threads=1)
    assert {name: problems for name, problems in results.items() if problems} == {}


def test_dead_container_is_replaced_and_the_program_run_again(remote):
    sandbox = remote("Container")
    assert sandbox.run(Program("print(1)")).status == "ok"
    Container.made[-1].kill()
    time.sleep(0.2)
    assert sandbox.run(Program("print(2)")).stdout == "2\n"
    assert len(Container.made) == 2
    assert sandbox.counts["again"] == 1


class Mute:
    """Starts, and does not do what it should."""

    says: tuple[str, ...] = ()

    def __init__(self):
        self.output = iter(self.says)

    def send(self, line):
        if not self.says:
            raise OSError("no machine is free")

    def close(self):
        pass


class Babbling(Mute):
    says = ("{}\n", '{"status": 3}\n', "not JSON\n", "[]\n" * 9)


@pytest.mark.parametrize("name", ["Mute", "Babbling"])
def test_invalid_remote_answer_is_an_infrastructure_fault(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "containers_of_tests", sys.modules[__name__])
    sandbox = Sandbox(f"containers_of_tests:{name}", slots=1)
    assert sandbox.run(Program("print(1)")).status == "infra_error"
    with pytest.raises(SandboxError, match=rf"^sandbox\.level='containers_of_tests:{name}'"):
        sandbox.probe()


def test_a_name_that_leads_nowhere_is_refused_at_once():
    with pytest.raises(ConfigError):
        Sandbox("os:nothing")
