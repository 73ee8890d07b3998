"""The unprivileged processes that read what guests send: `dns`, `peek`, `records`. The node starts and watches them."""
