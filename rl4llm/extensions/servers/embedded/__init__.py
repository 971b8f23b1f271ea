"""The embedded engine as a server: one more engine of a fleet, which starts in seconds."""
