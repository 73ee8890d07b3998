"""Where a sandbox goes: capacity is reserved before anything is made, and released when it is gone."""
