"""A server that speaks the protocol of the Tinker SDK, on this machine's models."""
