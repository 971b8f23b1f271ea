"""What a process lives in: ranks, deadlines, threads, terminals and the processor."""
