"""``rl4llm check``: validate a user's setup against the invariants of `rl4llm train`, in about a minute.

Read `run.py` (the checks in their order), `bench.py` (what they run on), `parts.py` (data, rewards, sandbox, template,
environment), `machine.py` (servers, hosts, disk) and `laws.py` (tokens, log-probs, weights, loss).
"""
