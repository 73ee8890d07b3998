"""Previews: servers inside a sandbox, reached by a host name of their own. Its own listener, its own domain."""
