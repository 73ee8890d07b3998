"""What the API offers; `table.py` is the whole of it on one screen."""
