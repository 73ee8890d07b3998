"""Profiles: what a kind of work prepares, runs and returns. Built on the public SDK only."""
