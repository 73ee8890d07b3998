"""Client of the agents inside sandboxes. Whatever an agent answers is untrusted: bounded, checked, never followed."""
