"""Adapters for environments of other libraries. Each library is imported only when its environment is built."""
