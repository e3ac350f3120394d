"""Stand-ins that fail the way the real things fail."""
