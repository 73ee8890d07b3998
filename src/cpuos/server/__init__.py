"""The control plane: decides and records. Data goes past it, from the client to the gateway."""
