"""Weight sync with servers: through files, requests or a process group."""
