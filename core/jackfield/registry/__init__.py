"""From installed plugins to checked backends: entry points, what they offer, who they are."""
