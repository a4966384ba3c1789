"""A latency-first inference engine for robot policies; `phyai.engine` is where to begin."""
