"""Programs that benchmarks run beside each other: ours and TRL's, each in a process of its own."""
