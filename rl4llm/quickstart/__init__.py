"""The first run: a small model, built and trained from nothing on this machine."""
