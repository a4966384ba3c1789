"""What fusions of projections with sparse and with dense attention share."""
