"""Contracts, types and registries, which everything else builds on."""

__path__.append(f"{__path__[0]}/../extensions/migration/former/core")  # modules that michaelnny/rl4llm has
