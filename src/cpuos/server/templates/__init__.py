"""Templates that workspaces build: names, recipes, builds."""
