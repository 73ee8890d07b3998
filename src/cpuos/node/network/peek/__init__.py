"""Reads the host name at the beginning of a connection and carries the connection on, if that name may be reached."""
