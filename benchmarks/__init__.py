"""Speed and size, as ratios from one run with the bare tool beside the product."""
