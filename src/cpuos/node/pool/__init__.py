"""Ready sandboxes: started before anyone asked, so that a create only has to take one."""

from cpuos.node.pool.pool import Pool, PoolLimits

__all__ = ["Pool", "PoolLimits"]
