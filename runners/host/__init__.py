"""The agent of a host: heartbeats, claims, preflight, shipping, enrolment."""
