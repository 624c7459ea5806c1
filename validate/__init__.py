"""Is a bundle right, and is it fast enough, on this target: metrics, gates, reports, self-test."""
