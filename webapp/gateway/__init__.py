"""The gateway: one address for the team's models, from clients through tunnels to endpoints."""
