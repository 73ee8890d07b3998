"""cpuOS: self-hosted computers for AI agents."""
