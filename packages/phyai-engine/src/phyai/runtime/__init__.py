"""Run-time state that outlives one layer call: caches and index plans."""
