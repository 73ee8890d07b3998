"""Network of sandboxes: a hub, and for each of them a router that holds its policy. `network.py` puts it together.

Nothing is imported here: workers and the slot maker load only their own part.
"""
