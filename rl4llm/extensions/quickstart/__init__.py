"""The first run: build and train a small model on this machine."""
