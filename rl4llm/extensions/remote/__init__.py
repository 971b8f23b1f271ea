"""Environments on other machines: the trainer keeps the tokens, a host runs the episodes, tools and rewards.

Read in this order: `environments.proto` (the protocol), `wire.py` (types as messages), `host.py` (a host),
`serve_env.py` (the server of `rl4llm serve env`), `hosts.py` (connections of a trainer), `env.py`
(the environment of a trainer), `rpc.py` (gRPC, which no other file uses) and `token.py` (the shared secret).
"""
