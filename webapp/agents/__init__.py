"""What the site and the agents on hosts send each other: heartbeats, commands, events."""
