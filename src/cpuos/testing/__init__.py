"""What tests of cpuOS, and of what is built on it, need: a fake runtime, a hostile agent, faults, whole instances."""
