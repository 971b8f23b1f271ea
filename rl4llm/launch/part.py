"""``rl4llm launch CONFIG --as ROLE``: the command line that one process of a run becomes, from its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.inference.ports import is_loopback
from rl4llm.launch.roles import NUMBER, hosts_variable, read_hosts, roles, words


def part(
    config: str, overrides: Sequence[str], name: str, environ: Mapping[str, str], *, force: bool = False
) -> list[str]:
    """The words after ``rl4llm`` of the process with the role `name`; raises ConfigError for what it cannot be.

    Args:
        environ: RL4LLM_NUMBER, and the hosts of every role of the configuration.
        force: whether the trainer goes on with a run although its configuration changed.
    """
    chosen = load_config(config, overrides)
    here = all(is_loopback(host) for host in environ.get(hosts_variable("trainer"), "?").split(","))
    wanted = {role.name: role for role in roles(chosen, ("rl4llm", "launch", config), here=here)}
    if name not in wanted:
        asked = ", ".join(wanted)
        raise ConfigError(f"--as {name} is not accepted: the section `launch` of {config} asks for {asked} only.")
    number = environ.get(NUMBER, "0")
    if not number.isdecimal():
        raise ConfigError(f"{NUMBER}={number!r} is not accepted: a number from 0, of this process among those of its role.")
    hosts = read_hosts(environ, list(wanted.values()))
    found = words(chosen, [config, *overrides], wanted[name], int(number), hosts)
    return [*found, "--force"] if force and name == "trainer" else found
