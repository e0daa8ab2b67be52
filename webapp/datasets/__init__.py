"""Training data that people hand to the server, for jobs on any host of their team."""
