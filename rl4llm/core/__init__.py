"""Contracts, types and registries, which everything else builds on."""
