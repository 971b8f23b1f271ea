"""``rl4llm launch CONFIG --as ROLE``: the command line that one process of a run becomes, from its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.roles import NUMBER, hosts_variable, read_hosts, roles, words
from rl4llm.runtime.ports import is_loopback


def part(
    config: str, overrides: Sequence[str], name: str, environ: Mapping[str, str], *, force: bool = False
) -> list[str]:
    """Return the words after ``rl4llm`` of the process with the role `name`. Raises ConfigError for an invalid role.

    Args:
        environ: RL4LLM_NUMBER, and the hosts of every role of the configuration.
        force: whether the trainer resumes a run although its configuration changed.
    """
    chosen = load_config(config, overrides)
    here = all(is_loopback(host) for host in environ.get(hosts_variable("trainer"), "?").split(","))
    wanted = {role.name: role for role in roles(chosen, ("rl4llm", "launch", config), here=here)}
    if name not in wanted:
        asked = ", ".join(wanted)
        raise ConfigError(
            f"--as {name} is not accepted: the section `launch` of {config} asks only for {asked}."
        )
    number = environ.get(NUMBER, "0")
    if not number.isdecimal():
        raise ConfigError(
            f"{NUMBER}={number!r} is not accepted. Accepted: the number of this process within its role, from 0."
        )
    hosts = read_hosts(environ, list(wanted.values()))
    found = words(chosen, [config, *overrides], wanted[name], int(number), hosts)
    return [*found, "--force"] if force and name == "trainer" else found
