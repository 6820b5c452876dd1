"""From installed plugins and a caller's words to a plan."""
