"""The node daemon: the one root process of a machine. It takes typed steps and parses nothing that a guest made."""
