"""The files of `examples/clusters` start each process of a run with its number and the hosts of the others."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rl4llm.cli import build_parser
from rl4llm.config import load_config
from rl4llm.extensions.launch.roles import part, roles

TEMPLATES = Path(__file__).parents[3] / "examples" / "clusters"


def configured(text, directory):
    """Write the configuration that a template's first lines show; returns its path."""
    lines = re.findall(r"^# {3}((?:inference|launch|output): \{.*?\})", text, re.MULTILINE)
    assert len(lines) == 3
    path = directory / "config.yaml"
    path.write_text("model: {path: m, device: cpu}\ndata: {path: arithmetic}\n" + "\n".join(lines))
    return path


@pytest.fixture
def pods(tmp_path):
    """The configuration of the Kubernetes template, and its pods by role."""
    text = (TEMPLATES / "kubernetes.yaml").read_text()
    objects = [item for item in yaml.safe_load_all(text) if item["kind"] != "Service"]
    found = {item["metadata"]["name"].removeprefix("run-"): item for item in objects}
    return configured(text, tmp_path), found


def test_kubernetes_pods_become_processes_of_the_run(pods, monkeypatch):
    config, found = pods
    monkeypatch.setattr("rl4llm.backends.model_files.model_directory", lambda path: path)
    for role in roles(load_config(config), ("rl4llm", "launch", "/etc/rl4llm/config.yaml")):
        spec = found[role.name]["spec"]
        assert spec["replicas" if role.name == "server" else "completions"] == role.count
        (container,) = spec["template"]["spec"]["containers"]
        assert container["command"] == list(role.command)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        environ = {item["name"]: item.get("value") for item in container["env"]}
        assert set(role.secrets) <= environ.keys()
        mounted = {item["name"] for item in container["volumeMounts"]}
        assert mounted == {item["name"] for item in spec["template"]["spec"]["volumes"]}
        for number in range(role.count):
            words = part(str(config), [], role.name, {**environ, "RL4LLM_NUMBER": str(number)})
            assert vars(build_parser().parse_args(words))["run"]


def test_skypilot_nodes_start_the_process_of_their_rank(cluster, tmp_path):
    text = (TEMPLATES / "skypilot.yaml").read_text()
    task = yaml.safe_load(text)
    wanted = roles(load_config(configured(text, tmp_path)), ("rl4llm", "launch", "config.yaml"))
    assert task["num_nodes"] == sum(role.count for role in wanted) == 3
    assert list(task["secrets"]) == sorted({name for role in wanted for name in role.secrets})
    run = task["run"].replace("sleep 5", "sleep 0.1").replace("/shared/", f"{tmp_path}/")
    cluster.add("rl4llm", (cluster.programs / "rl4llm").read_text().replace("-lt 8", "-lt 3"))
    nodes = []
    for rank in range(3):
        own = {"SKYPILOT_NODE_IPS": "a\nb\nc", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_TASK_ID": "t"}
        nodes.append(subprocess.Popen(["bash", "-c", run], env={**cluster.environ, **own}, cwd=tmp_path))
    assert [node.wait(60) for node in nodes] == [75, 0, 0]
    started = cluster.started()
    assert sorted(started) == ["server-0", "server-1", "trainer-0"]
    for name, (words, environ) in started.items():
        assert words == ["launch", "config.yaml", "--as", name.split("-")[0]]
        assert (environ["RL4LLM_TRAINER_HOSTS"], environ["RL4LLM_SERVER_HOSTS"]) == ("a", "b,c")
    assert not cluster.left()
