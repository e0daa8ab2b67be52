"""An endpoint under load: it is started, asked by many at once, and what they saw is told."""
