"""A model family for PhyAI from a package of its own."""
