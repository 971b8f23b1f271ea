"""The roles of a run follow from its configuration, and each process becomes a command line that is accepted."""

import pytest

from rl4llm.cli import _parsed
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.local import assigned
from rl4llm.extensions.launch.roles import ENV_TOKEN, SERVER_KEY, part, roles, words
from rl4llm.extensions.remote.command import parser
from rl4llm.extensions.remote.token import VARIABLE
from rl4llm.extensions.servers.server_command import server_command
from rl4llm.runtime.ports import KEY_VARIABLE

COMMAND = ("rl4llm", "launch", "run.yaml")
HOSTS = {"trainer": ["a", "b"], "server": ["c", "c", "d"], "router": ["a"], "env": ["fe80::1", "d"]}
ALL = [
    "model.path=hub/model", "data.path=arithmetic", "inference.name=sglang", "env.name=tool", "launch.nodes=2",
    "launch.nproc=8", "launch.gpu=H100", "launch.servers=3", "launch.server_gpus=2", "launch.server_gpu=L40S",
    "launch.router=true", "launch.env_hosts=2",
]  # fmt: skip


def test_the_keys_have_the_names_that_servers_and_hosts_read():
    assert (SERVER_KEY, ENV_TOKEN) == (KEY_VARIABLE, VARIABLE)


def of(*overrides, here=False):
    config = load_config(overrides=[*ALL, *overrides])
    return config, {role.name: role for role in roles(config, COMMAND, here=here)}


def line(name, number, *overrides):
    config, found = of(*overrides)
    return words(config, ["run.yaml"], found[name], number, HOSTS)


def test_launch_section_sets_roles_and_gpus():
    _, found = of()
    sizes = {name: (role.count, role.gpus, role.gpu) for name, role in found.items()}
    assert sizes == {
        "trainer": (2, 8, "H100"),
        "server": (3, 2, "L40S"),
        "router": (1, 0, None),
        "env": (2, 0, None),
    }
    assert found["server"].command == (*COMMAND, "--as", "server")
    _, alone = of("launch.servers=0", "launch.router=false", "launch.env_hosts=0", "model.device=cpu")
    assert [(role.name, role.gpus, role.secrets) for role in alone.values()] == [("trainer", 0, ())]


def test_role_receives_only_the_keys_that_it_asks_for_or_shows():
    _, found = of()
    key, token = "RL4LLM_SERVER_KEY", "RL4LLM_ENV_TOKEN"
    assert {name: role.secrets for name, role in found.items()} == {
        "trainer": (key, token), "server": (key,), "router": (key,), "env": (token,),
    }  # fmt: skip
    _, here = of("launch.nodes=1", here=True)
    assert not any(role.secrets for role in here.values())


def test_trainer_receives_the_addresses_of_the_others():
    arguments = _parsed(line("trainer", 1))
    assert (arguments.nproc, arguments.nnodes, arguments.node_rank, arguments.rendezvous) == (
        8,
        2,
        1,
        "a:29500",
    )
    config = load_config(overrides=[*ALL, *arguments.overrides])
    assert config.inference["url"] == ["http://c:30000", "http://c:30001", "http://d:30002"]
    assert config.inference["router"] == "http://a:30100"
    assert config.env["remote"] == ["[fe80::1]:50051", "d:50052"]


def test_hosts_may_have_ports_and_local_servers_have_logs(tmp_path):
    config, found = of("launch.nodes=1", f"output.dir={tmp_path}", here=True)
    hosts = {
        "trainer": ["127.0.0.1"],
        "server": [f"127.0.0.1:2000{n}" for n in range(3)],
        "router": ["127.0.0.1:7"],
    }
    hosts["env"] = ["[fe80::1]:8", "d:9"]
    server = words(config, ["run.yaml"], found["server"], 1, hosts)
    assert (server[-4:], server[server.index("--log") + 1]) == (
        ["--host", "127.0.0.1", "--port", "20001"],
        str(tmp_path / "logs" / "server-1.log"),
    )
    own = load_config(
        overrides=[*ALL, *_parsed(words(config, ["run.yaml"], found["trainer"], 0, hosts)).overrides]
    )
    assert own.inference["url"][2] == "http://127.0.0.1:20002"
    assert own.env["remote"] == ["[fe80::1]:8", "d:9"]


def test_force_reaches_only_the_trainer(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    known = {f"RL4LLM_{name.upper()}_HOSTS": ",".join(hosts) for name, hosts in HOSTS.items()}
    told = {
        name: part(str(tmp_path / "run.yaml"), ALL, name, known, force=True) for name in ("trainer", "server")
    }
    assert ["--force" in found for found in told.values()] == [True, False]


def hosted(words):
    """Return the arguments of `rl4llm serve env`."""
    assert words[:2] == ["serve", "env"]
    return parser().parse_intermixed_args(words[2:])


def test_every_part_gets_the_hosts_of_its_environment():
    own = ["parts={a: {data: {path: arithmetic}}, b: {env: {name: chat}}}"]
    arguments = _parsed(line("trainer", 0, *own))
    config = load_config(overrides=[*ALL, *own, *arguments.overrides])
    assert config.env["remote"] == config.parts["b"]["env"]["remote"] == ["[fe80::1]:50051", "d:50052"]
    assert hosted(line("env", 0, *own)).env == "tool,chat"


def test_an_embedded_server_computes_as_the_trainer(monkeypatch):
    monkeypatch.setenv("RL4LLM_SERVER_KEY", "k")
    own = [
        "model.dtype=bfloat16", "model.autocast=none", "model.vision=frozen", "deterministic=true", "threads=2",
    ]  # fmt: skip
    shape = ["inference.name=embedded", "launch.server_gpus=1", "launch.router=false"]
    words = line("server", 0, *shape, *own, "launch.server_flags=[inference.max_rows=8]")
    command = server_command("embedded", words[words.index("--restarts") + 2 :], python="python3")
    assert {*own, "inference.max_rows=8"} <= {*command.words}


def test_processes_listen_at_known_ports_and_check_a_key(monkeypatch):
    monkeypatch.setenv("RL4LLM_SERVER_KEY", "k")
    _, *rest = line("server", 2, "launch.server_flags=[--context-length, '64']")
    flags = rest[rest.index("--restarts") + 2 :]
    command = server_command("sglang", flags, python="python3")
    assert (command.host, command.port) == ("0.0.0.0", 30002)
    assert {("--model-path", "hub/model"), ("--tp-size", "2"), ("--context-length", "64")} <= {
        *zip(command.words, command.words[1:], strict=False)
    }
    assert command.environment["RL4LLM_SERVER_FLAGS"] == '["--api-key", "k"]'
    router = line("router", 0)
    assert router[router.index("--worker-urls") + 1 :][:3] == [
        "http://c:30000",
        "http://c:30001",
        "http://d:30002",
    ]
    host = hosted(line("env", 1))
    assert (host.env, host.host, host.port) == ("tool", "0.0.0.0", 50052)
    assert "--cpu" in line("server", 0, "launch.server_gpus=0")


def test_a_server_that_shares_a_gpu_can_free_its_memory():
    shared = ["inference.cohost=true", "launch.router=false", "launch.nodes=1", "launch.server_flags=[--x]"]
    config, found = of(*shared, here=True)
    server = words(config, ["run.yaml"], found["server"], 0, HOSTS)
    start = server.index("--enable-memory-saver")
    assert server[start : start + 4] == ["--enable-memory-saver", "--mem-fraction-static", "0.7", "--x"]
    assert found["server"].shares_gpus
    assert not found["trainer"].shares_gpus
    assert "--enable-memory-saver" not in line("server", 0)


@pytest.mark.parametrize(("overrides", "here"), [
    (["inference.name=local"], False),
    (["inference.name=vllm", "launch.router=false"], False),
    (["launch.servers=0"], False),
    (["inference.cohost=true", "launch.router=false"], False),
    (["inference.cohost=true", "launch.nodes=1"], True),
    (["launch.nodes=2"], True),
    (["inference.api_key=abc"], False),
    (["inference.url=http://me:abc@host:1"], False),
    (["rewards=[{name: llm_judge, url: 'http://h/v1', api_key: abc}]"], False),
    (["env.tools=[{name: mcp, command: [s], env: {TOKEN: abc}}]"], False),
])  # fmt: skip
def test_impossible_roles_and_secrets_in_files_are_refused(overrides, here):
    with pytest.raises(ConfigError) as caught:
        of(*overrides, here=here)
    assert "abc" not in str(caught.value)


def test_one_machine_needs_no_key():
    of("inference.name=vllm", "launch.router=false", "launch.nodes=1", here=True)


def test_a_role_that_the_run_lacks_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {path: m}\ndata: {path: arithmetic}")
    with pytest.raises(ConfigError, match="trainer"):
        part(str(tmp_path / "run.yaml"), [], "router", {"RL4LLM_TRAINER_HOSTS": "127.0.0.1"})


@pytest.mark.parametrize("environ", [{"RL4LLM_SERVER_HOSTS": "c,d"}, {"RL4LLM_ENV_HOSTS": ""}])
def test_process_without_its_hosts_is_refused(environ, tmp_path):
    (tmp_path / "run.yaml").write_text("")
    hosts = {f"RL4LLM_{name.upper()}_HOSTS": ",".join(names) for name, names in HOSTS.items()}
    with pytest.raises(ConfigError):
        part(str(tmp_path / "run.yaml"), ALL, "server", {**hosts, **environ})


def test_gpus_of_a_machine_are_given_to_one_process_each():
    machine = assigned([*of("launch.nodes=1")[1].values()][:2])
    assert [place.devices for place in machine] == [tuple(range(8)), (8, 9), (10, 11), (12, 13)]
    assert machine[3].environ() == {"RL4LLM_NUMBER": "2", "CUDA_VISIBLE_DEVICES": "12,13"}
