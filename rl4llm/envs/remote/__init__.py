"""Environments on other machines: the trainer keeps the tokens, a host runs the episodes, tools and rewards.

In the order of reading: `environments.proto` (what is said), `wire.py` (nouns as messages), `host.py` and `scoring.py` (a
host), `hosts.py` (the hosts as a trainer sees them), `env.py` (the environment that asks them), `rpc.py` (gRPC, which no
other file knows).
"""
