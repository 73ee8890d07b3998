"""What the control plane remembers."""
