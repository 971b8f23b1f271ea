"""Hidden tests decide after an episode, in a second start: nothing that an episode left behind counts as a reward."""

import shutil

import pytest
from task_files import HARBOR, TERMINAL_BENCH, graded, write_task

from rl4llm.core.errors import DataError, RL4LLMError
from rl4llm.extensions.tasks.verdict import Verdict
from rl4llm.extensions.workspaces import WorkspaceError

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")


@pytest.mark.parametrize("files", [HARBOR, TERMINAL_BENCH])
def test_tests_grade_what_an_episode_left(tmp_path, files):
    task = write_task(tmp_path, files)
    assert graded(task).reward == 0
    assert graded(task, "echo 4 > /answer").reward == 1


LOOP = "while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done"
ATTACKS = {
    "writes_the_reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "writes_the_other_reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
    "writes_a_report": 'mkdir -p /logs/verifier; echo \'{"results": {"tests": []}}\' > /logs/verifier/ctrf.json',
    "keeps_the_reward_open": "mkdir -p /logs/verifier; (exec 3>/logs/verifier/reward.txt; setsid sleep 60 >&3 &)",
    "links_the_logs": "mkdir -p /mine/verifier; ln -s /mine /logs; echo 1 > /mine/verifier/reward.txt",
    "links_the_reward": "mkdir -p /logs/verifier; echo 1 > /one; ln -s /one /logs/verifier/reward.txt",
    "locks_the_logs": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod -R a-w /logs; chmod 0 /logs",
    "makes_the_logs_a_file": "echo 1 > /logs",
    "makes_the_logs_a_pipe": "mkfifo /logs",
    "locks_the_root": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod a-w /",
    "brings_own_tests": "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "links_the_tests": "mkdir /mine; echo 'echo 1 > /logs/verifier/reward.txt' > /mine/test.sh; ln -s /mine /tests",
    "makes_the_tests_a_file": "echo 1 > /tests",
    "locks_the_tests": "mkdir /tests; chmod 0 /tests",
    "waits_for_the_tests": f"(setsid sh -c '{LOOP}' &)",
    "forks_for_ever": f"(setsid sh -c 'f() {{ f | f & }}; f; {LOOP}' &) ; sleep 1",
    "shadows_cat": "cd /root; printf '#!/bin/sh\\necho 4' > cat; chmod +x cat; export PATH=/root:$PATH ENV=/root/cat",
    "writes_a_profile": "for f in /etc/profile ~/.profile ~/.shrc /etc/bash.bashrc; do echo 'echo 4 > /answer' > $f; done",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_an_episode_prepares_does_not_count(tmp_path, attack):
    task = write_task(tmp_path)
    assert graded(task, attack).reward == 0


BUSYBOX = shutil.which("busybox")
NAMES = ("sh", "cat", "rm", "mv", "mkdir", "chmod", "grade")
LOST = ["/bin/rm -rf /bin", "mv /bin /bin2", "rm /bin/grade", "echo exit > /bin/grade"]
GRADE = "echo 1 > /logs/verifier/reward.txt\n"


@pytest.fixture
def small_task(tmp_path):
    """Return small_task(tool): a task whose tests run /bin/grade of its image, which `tool` is."""
    if BUSYBOX is None:
        pytest.skip("busybox is not installed: apt-get install busybox-static")

    def written(tool):
        root = tmp_path / "root"
        (root / "bin").mkdir(parents=True)
        shutil.copy(BUSYBOX, root / "bin" / "busybox")
        for name in NAMES:
            (root / "bin" / name).symlink_to("busybox")
        (root / "bin" / "grade").unlink()
        (root / "bin" / "grade").write_text(tool)
        (root / "bin" / "grade").chmod(0o755)
        files = {"environment/Dockerfile": f"FROM {root}\n", "tests/test.sh": "grade # reward.txt\n"}
        return write_task(tmp_path / "task", HARBOR | files)

    return written


@pytest.mark.parametrize("attack", LOST)
def test_an_episode_that_breaks_its_tests_gets_0(small_task, attack):
    task = small_task(f"#!/bin/sh\n{GRADE}")
    assert graded(task).reward == 1
    assert graded(task, attack).reward == 0


def test_tests_that_never_work_are_the_tasks_fault(small_task):
    task = small_task("#!/bin/sh\nexit 0\n")
    for episode in ("true", "rm /bin/grade", "/bin/rm -rf /bin"):
        with pytest.raises(DataError):
            graded(task, episode)


def test_tests_have_a_new_home_unless_the_task_names_one(tmp_path):
    test = "python3 -c 'print(1)'; ls -A $HOME; cat ~/seen; exit 1\n"
    user = "$(python3 -c 'import site; print(site.getusersitepackages())')"
    code = f"mkdir -p {user}; echo 'print(2)' > {user}/usercustomize.py; echo 3 > ~/seen"
    task = write_task(tmp_path / "a", TERMINAL_BENCH, **{"run-tests.sh": test})
    assert graded(task, code).output.startswith("1\ncat: ")
    toml = HARBOR["task.toml"].replace("[agent]", "env = {HOME = '/root'}\n[agent]")
    task = write_task(tmp_path / "b", task_toml=toml, tests_test_sh=test)
    assert graded(task, code).output.endswith("3\n")


def test_a_forged_exit_code_needs_no_reward_file(tmp_path):
    task = write_task(tmp_path, TERMINAL_BENCH)
    assert graded(task, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt").reward == 0


def test_an_episode_sees_neither_tests_nor_solution(tmp_path):
    task = write_task(tmp_path, tests_secret="4", tests_test_sh="[ -e /seen ] && cat /seen; exit 1\n")
    names = "-name solve.sh -o -name secret -o -name test.sh"
    look = f"(cat /tests/secret /solution/solve.sh || ls -R /tests /solution || find / {names})"
    verdict = graded(
        task, f"{look} > /seen 2>/dev/null; grep -rlsI 'echo 4 >' /root /tmp /opt /home /run >> /seen"
    )
    assert verdict.output.strip() == "" and verdict.reward == 0


def test_tests_stay_as_they_are(tmp_path):
    spoil = "echo 'exit 0' > /tests/test.sh; rm -rf /tests/*; exit 1\n"
    task = write_task(tmp_path, tests_test_sh=spoil)
    assert graded(task).reward == 0 and graded(task).reward == 0
    assert (task / "tests/test.sh").read_text() == spoil


@pytest.mark.parametrize("hang", ["sleep 60", "trap '' TERM; while :; do :; done", "setsid sleep 60 & wait"])
def test_tests_that_hang_give_0_in_their_time(tmp_path, hang):
    toml = HARBOR["task.toml"].replace("20.0", "1.0", 1)
    task = write_task(tmp_path, task_toml=toml, tests_test_sh=f"sh /program; {HARBOR['tests/test.sh']}")
    verdict = graded(task, f"cat > /program <<'end'\n{hang}\nend")
    assert verdict.reward == 0 and verdict.tests == {}
    assert verdict.timed_out and verdict.output.endswith("[stopped after 1 s]")


def test_a_tested_program_writes_nothing_after_the_tests(tmp_path):
    task = write_task(tmp_path, tests_test_sh=f"sh /program\n{HARBOR['tests/test.sh']}")
    late = "setsid sh -c 'sleep 0.05; while :; do echo 1 > /logs/verifier/reward.txt; done' &"
    assert graded(task, f"cat > /program <<'end'\n{late}\nend").reward == 0


def test_a_full_disk_is_no_success(tmp_path):
    test = "echo started\n[ -e /good ] && good=1 || good=0\necho $good > /logs/verifier/reward.txt\nexit 0\n"
    task = write_task(tmp_path, tests_test_sh=test)
    assert graded(task).reward == 0
    try:
        reward = graded(task, "dd if=/dev/zero of=/big bs=1M count=4000 2>/dev/null").reward
    except (DataError, WorkspaceError):
        reward = 0
    assert reward == 0


@pytest.mark.parametrize("text", ["echo 2", "echo nan", "echo yes", "true"])
def test_an_invalid_reward_fails_the_sample(tmp_path, text):
    task = write_task(tmp_path, tests_test_sh=f"{text} > /logs/verifier/reward.txt\n")
    with pytest.raises(DataError):
        graded(task)


def test_a_promise_of_a_program_of_the_tests_counts(tmp_path):
    write_task(tmp_path, **{"tests/judge.py": 'open("/logs/verifier/reward.txt", "w").write("1")\n'})
    with pytest.raises(DataError):
        graded(write_task(tmp_path, tests_test_sh="python3 /tests/no_judge.py; exit 0\n"))


def test_tests_that_cannot_start_fail_the_sample(tmp_path):
    task = write_task(tmp_path, tests_test_sh="#!/no/such/shell\nexit 1\n")
    with pytest.raises(RL4LLMError):
        graded(task)
    with pytest.raises(DataError):  # before the episode
        graded(task, "mkdir -p /no/such; cp /bin/sh /no/such/shell")


def test_a_task_has_its_own_image_variables_and_directory(tmp_path):
    toml = (
        HARBOR["task.toml"] + "env = {A = 'solution'}\n[environment]\nworkdir = '/work'\nenv = {B = 'both'}\n"
    )
    toml = toml.replace("timeout_sec = 20.0\n", "timeout_sec = 20.0\nenv = {A = 'tests'}\n", 1).replace(
        "[agent]\ntimeout_sec = 20.0\nenv", "[solution]\nenv"
    )
    task = write_task(
        tmp_path,
        task_toml=toml,
        tests_test_sh='echo "$A $B $(pwd) $(cat seen)"\n',
        solution_solve_sh='echo "$A $B $(pwd)" > seen\n',
    )
    assert graded(task, 'echo "$B" > seen').output == "tests both /work both\n"


def test_the_share_of_passed_tests_is_the_reward(tmp_path):
    xml = "<t><testcase name='a'/><testcase name='b'><failure/></testcase></t>"
    task = write_task(tmp_path, tests_test_sh=f'echo "{xml}" > /logs/verifier/junit.xml; exit 1\n')
    assert graded(task) == Verdict(0.5, {"a": True, "b": False}, "")
