"""What fusions of projections with sparse Piper attention share, whatever the weight format."""
