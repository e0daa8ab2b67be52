"""Training data uploaded to the server, for jobs on any host of the team."""
