"""A launch file (YAML) -> a checked Graph -> running components."""
