"""Many servers as one engine, which survives the loss of some."""
