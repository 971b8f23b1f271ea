"""``rl4llm check``: the laws of `rl4llm train`, held against a user's own setup in about a minute.

Read `run.py` (which checks there are, in their order), `bench.py` (what they are done on), `parts.py` (data, rewards,
sandbox, template, environment), `machine.py` (servers, hosts, disk) and `laws.py` (tokens, log-probs, weights, loss).
"""

from rl4llm.check.run import CHECKS, Check, Result, check

__all__ = ["CHECKS", "Check", "Result", "check"]
