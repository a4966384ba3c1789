"""What the feed-forward fusions share."""
