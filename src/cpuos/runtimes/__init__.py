"""Runtimes: what turns a prepared disk, network slot and template into a running sandbox."""
